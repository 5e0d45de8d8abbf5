"""The memory that a case needs, as a multiple of its inputs and outputs.

    python benchmarks/memory_cost.py                    # 6 GiB in, 6 GiB out, on a GPU
    python benchmarks/memory_cost.py --device cpu --mib 64

Checks and times the page in this file, and prints the peak memory of each phase. A GPU's peaks come
from torch's allocator. On a CPU, the bytes of all tensors that exist are counted after each
operation, so memory inside an operation is not included.

The temporary tensors of the page's own reference are part of the peaks. The line "reference alone"
shows how much they need.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from pytest_aisp import Work, compare
from pytest_aisp.checking import inputs, perturbation
from pytest_aisp.results.messages import CheckTask, TimeTask
from pytest_aisp.timing import unseen_values
from pytest_aisp.util import cpu_load, pytree
from pytest_aisp.util.device_state import Stopwatch
from pytest_aisp.worker.engine import Engine

MIB = 1 << 20
SHORT = {"blocks": 8, "least": 2, "seconds": 0.05, "window": 1e-3, "warmup": 3}


def elementwise_inputs(device: str, n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 1024, device=device),)


def two_kernels(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def one_kernel(x: torch.Tensor) -> torch.Tensor:
    return torch.add(torch.ones((), device=x.device), x, alpha=2)


def rows_inputs(device: str, n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 1024, device=device),)


def norm(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dim=1)


def root_of_squares(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, ord=2.0, dim=1)


def column_inputs(device: str, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 1, device=device), torch.randn(1, 1024, device=device)


def outer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y


def outer_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.outer(x.view(-1), y.view(-1))


def page(baseline: Any, optimized: Any, inputs: Any, reference: Any, terms: int = 1) -> Any:
    """Return the test of a page with one large input, one large output, or both."""

    @compare(
        baseline=baseline,
        optimized=[optimized],
        inputs=inputs,
        reference=reference,
        sizes=[{"n": 1 << 20}],
        check_sizes=[{"n": 33}],
        work=lambda n: Work(read=4096 * n, write=4096 * n, terms=terms, roundings=2),
        bound="dram",
    )
    def test(pair: Any) -> None:
        pair.assert_equivalent()
        pair.assert_speedup()

    return test


both = page(two_kernels, one_kernel, elementwise_inputs, lambda x: 2 * x.double() + 1)
reduction = page(norm, root_of_squares, rows_inputs, lambda x: norm(x.double()), terms=1024)
expansion = page(outer, outer_product, column_inputs, lambda x, y: x.double() * y.double())
PAGES = {"both": both, "reduction": reduction, "expansion": expansion}


class LiveBytes(TorchDispatchMode):
    """Count the bytes of all tensors that exist, after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                storage = leaf.untyped_storage()
                reference = StorageWeakRef(storage)
                self._alive[reference.cdata] = reference, storage.nbytes()
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """Return the bytes of the tensors that exist."""
        self._alive = {k: v for k, v in self._alive.items() if not v[0].expired()}
        return sum(size for _, size in self._alive.values())

    def reset(self) -> None:
        """Let the next peak start from the bytes that exist now."""
        self.peak = self.now()


class PeakWatch(Stopwatch):
    """A stopwatch that also records the peak memory of each phase."""

    def __init__(self, read: Callable[[], int], reset: Callable[[], None]) -> None:
        super().__init__()
        self.peaks: dict[str, int] = {}
        self.reserved = 0
        self._read_peak, self._reset_peak = read, reset

    def _switch(self, name: str) -> str:
        before = super()._switch(name)
        self.peaks[before] = max(self.peaks.get(before, 0), self._read_peak())
        if torch.cuda.is_initialized():
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
        self._reset_peak()
        return before


@contextmanager
def watched(device: str) -> Iterator[PeakWatch]:
    """Yield a stopwatch that records the peak memory on `device`."""
    if device == "cpu":
        with (
            patch.object(cpu_load, "STOLEN", math.inf),  # times do not matter here
            patch.object(inputs, "KEPT_SHARE", 0.0),  # a small tensor is treated as a large one
            patch.object(unseen_values, "SLOT_BYTES", 0),
            patch.object(unseen_values, "KEPT_BYTES", 0),
            patch.object(pytree, "PIECE", 1 << 16),
            patch.object(perturbation, "SIGNS", 4099),  # its 16 MiB would not be small
            patch.object(perturbation, "_signs", perturbation._signs.__wrapped__),
            LiveBytes() as live,
        ):
            yield PeakWatch(lambda: live.peak, live.reset)
        return
    torch.cuda.reset_peak_memory_stats()
    yield PeakWatch(torch.cuda.max_memory_allocated, torch.cuda.reset_peak_memory_stats)


def peaks(name: str, device: str, mib: int, seed: int = 1) -> dict[str, dict[str, float]]:
    """Check and time a page. Return the peak of each phase, in multiples of inputs and outputs.

    Args:
        mib: the size of the largest input or output, in MiB.
    """
    case = {
        "page": __file__,
        "root": str(Path(__file__).parent),
        "module": "memory_cost_page",
        "function": name,
        "variant": PAGES[name].pytestmark[0].kwargs["pair"].variants[0].name,
        "size": {"n": mib * 256},
        "device": device,
        "seed": seed,
        "rule": {},
        "without": ("repeats", "own-clock"),  # the first compares times; tests replace functions
    }
    unit = mib * MIB * (2 if name == "both" else 1)
    found = {}
    with watched(device) as watch:
        engine = Engine(watch=watch)
        for task in ("check", "time"):
            watch.peaks = {}
            if task == "check":
                engine.check(CheckTask(at="case", **case))
            else:
                engine.time(TimeTask(budget=SHORT, **case))
            watch.read()
            found[task] = {phase: peak / unit for phase, peak in watch.peaks.items()}
    if watch.reserved:  # with the memory that torch's allocator keeps for later
        found["the whole case"] = {"reserved": watch.reserved / unit}
    found["reference alone"] = {"temporary": _temporary(name, device, mib) / unit}
    return found


def _temporary(name: str, device: str, mib: int) -> int:
    """Return the bytes that the reference needs beyond inputs and outputs in float64."""
    pair = PAGES[name].pytestmark[0].kwargs["pair"]
    copies = [x.double() for x in pair.inputs(device, n=mib * 256)]
    before = 0 if device == "cpu" else torch.cuda.memory_allocated()
    with watched(device) as watch, watch.phase("reference"):
        outputs = pair.reference(*copies)
    return watch.peaks["reference"] - before - pytree.nbytes(outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mib", type=int, default=6144)
    parser.add_argument("--page", choices=PAGES, action="append")
    options = parser.parse_args()
    for name in options.page or PAGES:
        start = time.perf_counter()
        if options.device != "cpu":
            torch.cuda.empty_cache()
        found = peaks(name, options.device, options.mib)
        print(f"{name}, {options.mib} MiB: {time.perf_counter() - start:.1f} s")
        for task, phases in found.items():
            text = ", ".join(f"{phase} {peak:.2f}" for phase, peak in phases.items())
            print(f"  {task}: {text}")


if __name__ == "__main__":
    main()
