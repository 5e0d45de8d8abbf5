"""How much of a reduction overlaps with matrix products, and how much it slows them down.

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node=2 benchmarks/overlap.py

Copy engines move the data (suites/ch04/copy_engines.py). CUDA graphs of three calls are timed in
four ways: products alone, sums alone, products then sums, and products and sums at the same time.
The time of the slowest rank counts. The hidden share is (products + sums - both) / min(products,
sums). The slowdown of products that run at the same time as sums is measured without a graph. Calls
are queued behind a blocking kernel, and timed from the start of the first product to the end of the
last product. Rank 0 prints a Markdown table.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "suites"))

from ch04 import overlapped_test, tensor_parallel_test
from ch04.copy_engines import CopiedSums

from pytest_aisp.timing.cuda_graph import capture_graph

CALLS, WINDOWS, WARMUP = 3, 10, 4
BLOCKING = 4_000_000
"""Cycles of the blocking kernel: 2 ms."""
HEADS = ("work", "products", "sums", "in a row", "both", "hidden", "products beside sums")


@dataclass(frozen=True)
class Works:
    """Products and sums that can run at the same time.

    Attributes:
        products, sums: functions that do only the products, or only the sums.
        both: a function that does both. It calls its argument after the last product is launched.
        name: label of the table's row.
    """

    name: str
    products: Callable[[], Any]
    sums: Callable[[], Any]
    both: Callable[[Callable[[], Any]], Any]

    def in_a_row(self) -> None:
        """Run the products, and then the sums."""
        self.products()
        self.sums()


def tensor_parallel(inner: int, parts: int, rows: int = 8192) -> Works:
    """Return the linear layer of `tensor_parallel_test` with its rows in `parts`."""
    device = torch.device("cuda", torch.cuda.current_device())
    x, w = tensor_parallel_test.inputs(device, rows, inner, rows)
    cut = x.chunk(parts)
    sums = CopiedSums(parts, (len(cut[0]), len(w)), x)

    def multiplied(then: Callable[[int], Any]) -> None:
        for k, part in enumerate(cut):
            torch.mm(part, w.t(), out=sums.mine[k])
            then(k)

    def reduced() -> None:
        for k in range(parts):
            sums.start(k)
        sums.wait()

    def both(launched: Callable[[], Any]) -> None:
        multiplied(sums.start)
        launched()
        sums.wait()

    name = f"tensor_parallel, inner={inner}, {parts} parts"
    return Works(name, lambda: multiplied(lambda k: None), reduced, both)


def overlapped(layers: int = 16, width: int = 4096) -> Works:
    """Return the backward of `overlapped_test`, reduced layer by layer."""
    page, device = overlapped_test, torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    weights = list(page.state(device, layers, width).model.parameters())
    x, dy = page.inputs(device, layers, width)
    sums, order = CopiedSums(layers, (width, width), x), range(layers - 1, -1, -1)
    filled = torch.randn(width, width, device=device).bfloat16()

    def reduced() -> None:
        for k in order:
            sums.start(k, filled)
        sums.wait()

    def both(launched: Callable[[], Any]) -> None:
        ready = iter(order)
        gradients = page.gradients(weights, x, dy, lambda one: sums.start(next(ready), one.grad))
        launched()
        sums.wait()
        del gradients

    name = f"overlapped, layers={layers}, width={width}"
    return Works(name, lambda: page.gradients(weights, x, dy), reduced, both)


def between(mark: Callable[[torch.cuda.Event, torch.cuda.Event], Any]) -> float:
    """Return the slowest rank's median seconds between the two events that `mark` records."""
    flag, times = torch.zeros(1, device="cuda"), []
    for window in range(WARMUP + WINDOWS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.all_reduce(flag)  # the ranks start together
        mark(start, end)
        torch.cuda.synchronize()
        if window >= WARMUP:
            times.append(start.elapsed_time(end) * 1e-3)
    slowest = torch.tensor([statistics.median(times)], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def in_graphs(work: Callable[[], Any]) -> float:
    """Return the seconds that a call of `work` takes in a CUDA graph."""
    graph = capture_graph(lambda: [work() for _ in range(CALLS)])

    def mark(start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        start.record()
        graph.replay()
        end.record()

    return between(mark) / CALLS


def queued(work: Callable[[Callable[[], Any]], Any]) -> float:
    """Return the seconds from the start of `work` to when it calls its argument, on the GPU."""

    def mark(start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        torch.cuda._sleep(BLOCKING)
        start.record()
        work(end.record)

    return between(mark)


def row(works: Works) -> Iterator[str]:
    """Yield the cells of one row."""

    def alone(launched: Callable[[], Any]) -> None:
        works.products()
        launched()

    products, sums = in_graphs(works.products), in_graphs(works.sums)
    serial, both = in_graphs(works.in_a_row), in_graphs(lambda: works.both(lambda: None))
    yield works.name
    for seconds in (products, sums, serial, both):
        yield f"{seconds * 1e3:.3f} ms"
    yield f"{(products + sums - both) / min(products, sums):.0%}"
    yield f"{queued(works.both) / queued(alone):.2f} times as long"


def main() -> None:
    """Print the table on rank 0."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    makers = [lambda p=parts: tensor_parallel(3584, p) for parts in (4, 8, 16)]
    makers += [lambda i=inner: tensor_parallel(i, 16) for inner in (4096, 5120, 8192)]
    makers += [overlapped]
    lines = [HEADS, ("---",) * len(HEADS), *(tuple(row(make())) for make in makers)]
    if dist.get_rank() == 0:
        print("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)  # skips the slow teardown of graphs with collectives


if __name__ == "__main__":
    main()
