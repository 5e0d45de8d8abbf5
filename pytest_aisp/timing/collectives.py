"""Check the collectives of this process group on known values, then time them.

On GPUs a window is a CUDA graph of K calls. On CPUs, or if NCCL cannot be captured, a window is K
calls timed by the host's clock. The time of the slowest rank is used. Sizes and bandwidths are
defined as in nccl-tests (see its PERFORMANCE.md).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, TypedDict

from ..checking.inputs import BoundSide
from ..checking.numerics import Wrong
from ..page.pair import PageError
from ..util.cli_result import size_text, with_progress
from ..util.process_group import current_group
from .cpu_timer import HostWindow
from .cuda_graph import GraphWindow, Uncapturable, on_all_ranks
from .schedule import Window, calls_for

if TYPE_CHECKING:
    import torch

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ONE_SHOT = "one_shot"
ONE_SHOT_MOST = 16 << 20
"""Largest size in bytes for one-shot, in which every rank reads the whole buffer of every rank."""
WINDOWS = 7
LONG_WINDOW = 5e-3
"""Seconds of a window. Ranks start some microseconds apart, which must not matter."""
SMALLEST = 4 << 10
"""Bytes of the smallest all-reduce."""
ITEM = 4
"""Bytes of a float32."""


def bus_factor(op: str, ranks: int) -> float:
    """Return busbw / algbw: the bytes that each rank's link carries, divided by the size."""
    return (2 if op in ("all_reduce", ONE_SHOT) else 1) * (ranks - 1) / ranks


class CollectiveTime(TypedDict):
    """The time of one collective in seconds, at one size in bytes."""

    op: str
    size: int
    seconds: float
    clock: str


@dataclass(frozen=True)
class Collective:
    """One collective on its buffers.

    Attributes:
        nbytes: size of the buffer.
        run: a function that starts the collective.
        sent: the buffer that this rank sends.
        fill: the known values for `sent`.
        out: a function that returns the received buffer.
        expected: the expected values of `out`, one for each chunk.
    """

    name: str
    nbytes: int
    run: Callable[[], object]
    sent: torch.Tensor
    fill: torch.Tensor
    out: Callable[[], torch.Tensor]
    expected: torch.Tensor

    def check(self) -> None:
        """Run once on known values. Raise `Wrong` if this rank receives a wrong value."""
        self.sent.copy_(self.fill)
        self.run()
        parts = self.out().view(self.expected.numel(), -1)
        wrong = (parts != self.expected[:, None]).flatten()
        if bool(wrong.any()):
            at = int(wrong.int().argmax())
            got, right = float(parts.flatten()[at]), float(self.expected[at // parts.shape[1]])
            size = size_text(self.nbytes)
            raise Wrong(f"{self.name} of {size} is wrong: element {at} is {got:g}, not {right:g}")


def sweep(
    ops: Sequence[str], sizes: Sequence[int], device: str, progress: Callable[[str], object]
) -> dict[str, object]:
    """Return the time (s) and clock of each collective at each size, and the library versions.

    A size is the number of bytes in the buffer that is reduced, gathered into, scattered from, or
    exchanged. Sizes are rounded down so that each rank gets a whole number of elements. On GPUs,
    the result has the `latencies`, too.
    """
    import torch
    import torch.distributed as dist

    if current_group().world == 1:
        how = "\n    aisp links nccl"
        raise PageError(f"collectives need several ranks; this is one process{how}")
    rows: list[CollectiveTime] = []
    notes: list[str] = []
    makers: dict[str, Callable[[int, str], Collective]]
    makers = {op: partial(known_collective, op) for op in ops}
    if "all_reduce" in ops:
        refusal = _one_shot_refusal(device)
        if refusal is None:
            makers[ONE_SHOT] = _one_shot
        else:
            notes.append(f"one-shot all-reduce in symmetric memory is not available: {refusal}")
    cases = [(op, n) for op in makers for n in sizes if op != ONE_SHOT or n <= ONE_SHOT_MOST]
    for op, nbytes in cases:
        progress(with_progress(f"{op} of {size_text(nbytes)}", len(rows), len(cases)))
        rows.append(_timed(makers[op](nbytes, device), device))
    versions, least = {"torch": str(torch.__version__)}, dict[str, float]()
    if device.startswith("cuda"):
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        versions["device"] = torch.cuda.get_device_name()
        progress("the smallest all-reduce and a barrier")
        least = latencies(device)
    world, backend = current_group().world, dist.get_backend()
    found = {"rows": rows, "notes": notes, "latencies": least}
    return {**found, "ranks": world, "backend": backend, **versions}


def known_collective(op: str, nbytes: int, device: str) -> Collective:
    """Return `op` on `nbytes`, with known values that identify rank and chunk."""
    import torch
    import torch.distributed as dist

    rank, world = current_group().rank, current_group().world
    each = _elements_per_rank(nbytes)
    make = partial(torch.empty, dtype=torch.float32, device=device)
    whole, part = make(world * each), make(each)
    chunks = torch.arange(world, dtype=torch.float32, device=device)
    total = world * (world + 1) / 2
    mine = torch.full((1,), rank + 1.0, device=device)
    sums = torch.full((1,), total, device=device)
    collective = partial(Collective, op, whole.numel() * ITEM)
    if op == "all_reduce":
        reduce = partial(dist.all_reduce, whole)
        return collective(reduce, whole, mine.expand_as(whole), lambda: whole, sums)
    if op == "all_gather":
        gather = partial(dist.all_gather_into_tensor, whole, part)
        return collective(gather, part, mine.expand_as(part), lambda: whole, chunks + 1)
    if op == "reduce_scatter":
        scatter = partial(dist.reduce_scatter_tensor, part, whole)
        return collective(scatter, whole, mine.expand_as(whole), lambda: part, sums)
    received = make(world * each)
    exchange = partial(dist.all_to_all_single, received, whole)
    fill = (rank * world + chunks).repeat_interleave(each)  # chunk j goes to rank j
    return collective(exchange, whole, fill, lambda: received, chunks * world + rank)


def loop_of_all_reduces(sizes: Sequence[int], device: str) -> BoundSide:
    """Return a side that makes one all-reduce per size in `sizes` (in bytes), in this order."""
    collectives = [known_collective("all_reduce", nbytes, device) for nbytes in sizes]

    def all_reduces() -> None:
        for collective in collectives:
            collective.run()

    for collective in collectives:
        collective.check()
        collective.sent.zero_()  # repeated sums would overflow
    return BoundSide(all_reduces, [()])


def _elements_per_rank(nbytes: int) -> int:
    """Return the number of elements per rank, a multiple of 16 bytes as one-shot requires."""
    return max(1, nbytes // (4 * ITEM * current_group().world)) * 4


def _one_shot_refusal(device: str) -> str | None:
    """Return the reason why symmetric memory is unavailable, or None. All ranks agree."""
    try:
        if not device.startswith("cuda"):
            raise RuntimeError("it needs GPUs")
        _one_shot(1024, device)  # do not run it: one rank alone would wait forever
        refusal = None
    except Exception as error:  # drivers, containers and torch raise different errors
        refusal = (str(error) or type(error).__name__).splitlines()[0]
    return current_group().first_message(refusal)


def _one_shot(nbytes: int, device: str) -> Collective:
    """Return torch's one-shot all-reduce: each rank reads and sums the buffers of all ranks."""
    import torch
    import torch.distributed as dist

    group, world = dist.group.WORLD, current_group().world
    assert group is not None
    all_reduce = torch.ops.symm_mem.one_shot_all_reduce
    count = world * _elements_per_rank(nbytes)
    buffer, _ = _symmetric_buffer(count, device)
    last: list[torch.Tensor] = []

    def run() -> None:
        last[:] = [all_reduce(buffer, "sum", group.group_name)]

    fill = torch.full((1,), current_group().rank + 1.0, device=device).expand_as(buffer)
    sums = torch.full((1,), world * (world + 1) / 2, device=device)
    return Collective(ONE_SHOT, count * ITEM, run, buffer, fill, lambda: last[0], sums)


def _symmetric_buffer(count: int, device: str) -> tuple[torch.Tensor, Any]:
    """Return `count` fp32 numbers in symmetric memory, and torch's handle of this memory."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    group, mine = dist.group.WORLD, torch.device(device, torch.cuda.current_device())
    assert group is not None
    buffer = symmetric.empty(count, dtype=torch.float32, device=mine)
    return buffer, symmetric.rendezvous(buffer, group.group_name)


def latencies(device: str) -> dict[str, float]:
    """Return the seconds of the smallest ``all_reduce`` and, in symmetric memory, a ``barrier``.

    A copy runs before each collective, as a kernel does on a page. Without the copy, NCCL's
    all-reduces would take longer. The times of the copy and of starting a kernel are subtracted.
    The copy is so small that both take equally long.
    """
    import torch
    import torch.distributed as dist

    source, buffer = torch.zeros(2, SMALLEST // ITEM, device=device)
    runs: dict[str, Callable[[], object]]
    runs = {"copy": lambda: None, "all_reduce": partial(dist.all_reduce, buffer)}
    if _one_shot_refusal(device) is None:
        _, handle = _symmetric_buffer(SMALLEST // ITEM, device)
        runs["barrier"] = partial(handle.barrier, channel=0)

    def after_a_copy(run: Callable[[], object]) -> None:
        buffer.copy_(source)
        run()

    sides = {name: BoundSide(partial(after_a_copy, run), [()]) for name, run in runs.items()}
    seconds = {name: _seconds(side, device)[1] for name, side in sides.items()}
    copy = seconds.pop("copy")
    return {name: max(each - 2 * copy, 1e-9) for name, each in seconds.items()}


def _timed(collective: Collective, device: str) -> CollectiveTime:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renamed the functions
        collective.check()
        collective.sent.zero_()  # repeated sums would overflow; zeros take the same time to send
        clock, seconds = _seconds(BoundSide(collective.run, [()]), device)
    return {"op": collective.name, "size": collective.nbytes, "seconds": seconds, "clock": clock}


def _seconds(side: BoundSide, device: str) -> tuple[str, float]:
    """Return the clock and the slowest rank's seconds per call, as the median over the windows."""
    for clock, make in _clocks(device):
        try:
            window, calls = on_all_ranks(partial(make, side, 1)), 0
            # A window of few calls mostly shows how late a rank starts, so lengthen it first.
            while (more := calls_for(min(window() for _ in range(3)), LONG_WINDOW, 1)) > 2 * calls:
                calls = more
                window = on_all_ranks(partial(make, side, calls))
        except Uncapturable:
            continue
        window()
        return clock, median(window() for _ in range(WINDOWS))
    raise AssertionError("the host's clock captures nothing, so it cannot refuse")


def _clocks(device: str) -> Iterator[tuple[str, Callable[[BoundSide, int], Window]]]:
    if device.startswith("cuda"):
        yield "graph", GraphWindow
    yield "host", partial(HostWindow, device=device)


def bandwidths(row: CollectiveTime, ranks: int) -> tuple[float, float]:
    """Return the algbw and the busbw of a row, in bytes/s."""
    algbw = row["size"] / row["seconds"]
    return algbw, algbw * bus_factor(row["op"], ranks)
