"""A fourth clock: which kernels a side launches, and for how long the profiler sees them at work.

The profiler slows launching down, so it runs only under ``--aisp-audit``, when a result is
recorded, and where a page claims launches or goodput, after the windows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..checking.inputs import InputPool, alone
from ..isolation.protections import enabled
from ..page.pair import Side
from ..results.row import duration
from ..util.process_group import current_group

SHARE, SECONDS = 0.20, 1e-6
"""By how much the profiler's time may exceed that of the windows: it sees each kernel begin and
end, and at clocks of its own choosing."""
WARM = 3
"""Calls before launches are counted: the first may compile, tune or fill a cache."""
COMPUTING = 3
"""Calls whose seconds at compute are counted."""
NO_COMPUTE = (
    *("memcpy", "memset", "nccl", "nvshmem", "barrier", "spin_kernel"),
    *("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "all_to_all"),
)
"""What the names of kernels hold that move data, wait or talk to other ranks."""
NAME = 90
"""Characters of a kernel's name that are kept: templates have thousands."""


@dataclass(frozen=True)
class Kernels:
    """What a side's calls launched.

    Attributes:
        launches: how many of each kernel, copy and fill, per call.
        busy: seconds per call in which at least one of them was at work.
    """

    launches: dict[str, float]
    busy: float

    def contradiction(self, seconds: float) -> str:
        """Return what contradicts windows that say `seconds` a call, or nothing."""
        if not self.launches:
            return "nothing is launched on the GPU"
        if enabled("kernels-agree") and self.busy > seconds * (1 + SHARE) + SECONDS:
            return (
                f"kernels are at work for {self.busy * 1e6:.4g} us a call, the windows say"
                f" {seconds * 1e6:.4g} us"
            )
        return ""


def kernel_notes(by_side: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what to say of both sides' kernels, given as plain types."""
    said = []
    for name, kernels in by_side.items():
        counts = ", ".join(f"{n:g} x {kernel}" for kernel, n in kernels["launches"].items())
        said.append(f"{name} launches a call: {counts}; busy {duration(kernels['busy'])}")
    launches = [kernels["launches"] for kernels in by_side.values()]
    if len(launches) == 2 and launches[0] == launches[1]:
        said.append("both sides launch the same kernels")
    return said


def union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of ``(start, end)`` spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def summarize(events: Iterable[tuple[str, float, float]], calls: int) -> Kernels:
    """Return the kernels of ``(name, start, end)`` events, times in seconds, that `calls` made."""
    seen = list(events)
    counts = Counter(name[:NAME] for name, _, _ in seen)
    launches = {name: count / calls for name, count in sorted(counts.items())}
    return Kernels(launches, union((start, end) for _, start, end in seen) / calls)


def launched(
    work: Callable[[], Any], calls: int, counts: Callable[[str], bool] = lambda name: True
) -> Kernels:
    """Return what `work`, which makes `calls` calls, launches on the GPU.

    Args:
        counts: which of them, by name.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    events = profiler.events() or []
    on_gpu = [e for e in events if e.device_type.name == "CUDA" and counts(str(e.name))]
    spans = ((str(e.name), e.time_range.start * 1e-6, e.time_range.end * 1e-6) for e in on_gpu)
    return summarize(spans, calls)


def computes(name: str) -> bool:
    """Return whether a kernel of this name is of use: no copy, fill, collective or waiting."""
    return not any(word in name.lower() for word in NO_COMPUTE)


def launches(bench: InputPool, side: Side) -> float:
    """Return the kernels, copies and fills that a warm call launches; the most of any rank."""
    with _warm(bench, side) as run:
        return current_group().max(sum(launched(run, 1).launches.values()))


def computing(bench: InputPool, side: Side) -> float:
    """Return the seconds of a warm call in which a kernel computes; the least of any rank."""
    with _warm(bench, side) as run:
        busy = launched(lambda: [run() for _ in range(COMPUTING)], COMPUTING, computes).busy
        return -current_group().max(-busy)


@contextmanager
def _warm(bench: InputPool, side: Side) -> Iterator[Callable[[], Any]]:
    with alone(bench, side) as subject:
        for _ in range(WARM):
            subject.run(0)
        yield lambda: subject.run(0)
