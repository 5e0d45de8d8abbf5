"""Cross-check the times of windows with other clocks, and with the profiler's kernel times.

Three clocks time the same GPU work: CUDA events, the host's clock with the device idle before and
after, and the GPU's counter. A trick that fools one clock does not fool the others:

- Work hidden on a side stream is still running after the last event.
- Replaced events disagree with the host's clock and the counter.
- A replaced host clock disagrees with the events and the counter.

The profiler is a fourth clock, but slows launches down. So the profiler runs after the windows, and
only in three situations: with ``--aisp-audit``, when a result is recorded, or for pages that limit
launches or goodput.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..checking.inputs import InputPool, alone
from ..isolation.monkeypatches import now_ns
from ..isolation.protections import enabled
from ..page.pair import Side
from ..results.row import duration
from ..util.process_group import current_group

if TYPE_CHECKING:
    import torch

    from ..kernels.cuda_cpp import Kernel

STRETCH = 5e-3
"""The clocks are compared over at least this many seconds of work."""
MARGIN = 0.02
"""The clocks may differ by this share of the measured time, plus `HOST` or `COUNTER` seconds."""
HOST, COUNTER = 150e-6, 60e-6
"""Additional seconds for the launches on the host, and for the start and end of a timestamp."""
LATE, LATE_QUEUED, LATE_ON_RANKS = 50e-6, 30e-6, 150e-6
"""The device must be idle within this many seconds (plus `MARGIN`) after the last event.

Queued calls get no `MARGIN`. Work hidden on a side stream may end only one call late, and a margin
would hide that delay. With NCCL, an honest GPU became idle after 50 to 120 us, or after 450 us when
the NCCL calls had run for 0.2 s.
"""
ATTEMPTS = 5
"""A side is refused only if this many readings disagree. A busy host may disturb one reading."""


@dataclass(frozen=True)
class Clocks:
    """The time of the same work on each clock, in seconds.

    Attributes:
        events: time between two events on the side's stream.
        host: time from an idle device to the second event, or None if other work ran first.
        counter: time between two timestamps on that stream, or None if they cannot be compiled.
        late: time from the second event until the whole device was idle.
        queued: True if the calls were queued one by one, not replayed as a graph.
    """

    events: float
    host: float | None
    counter: float | None
    late: float
    queued: bool = False

    @property
    def allowed_lateness(self) -> float:
        """The largest `late` that is not an error, in seconds."""
        if current_group().world > 1:
            return MARGIN * self.events + LATE_ON_RANKS
        return LATE_QUEUED if self.queued else MARGIN * self.events + LATE

    def contradiction(self) -> str:
        """Return a message if another clock contradicts the events, else an empty string."""
        margin = MARGIN * self.events
        if enabled("no-late-work") and self.late > self.allowed_lateness:
            return (
                f"work continues for {self.late * 1e6:.3g} us after the last call of"
                f" {self.events * 1e6:.4g} us: the side does not wait for its own stream"
            )
        if not enabled("clocks-agree"):
            return ""
        if self.host is not None and not -margin < self.host - self.events < margin + HOST:
            return (
                f"the events measure {self.events * 1e6:.4g} us,"
                f" but the host measures {self.host * 1e6:.4g} us between full waits"
            )
        if self.counter is not None and abs(self.counter - self.events) > margin + COUNTER:
            return (
                f"the events measure {self.events * 1e6:.4g} us,"
                f" but the GPU's own counter measures {self.counter * 1e6:.4g} us"
            )
        return ""


def contradiction(read: Callable[[], Clocks]) -> str:
    """Return a message if the clocks disagree in every reading, else an empty string."""
    reason = ""
    for _ in range(ATTEMPTS):
        reason = current_group().first_message(read().contradiction() or None) or ""
        if not reason:
            return ""
    return reason


def read_clocks(
    work: Callable[[], None],
    start: torch.cuda.Event,
    end: torch.cuda.Event,
    before: Callable[[], None] | None = None,
) -> Clocks:
    """Time the GPU work that `work` launches on the current stream with each clock.

    Args:
        before: a function that launches untimed work before `work`. With `before`, the host's clock
            is not read.
    """
    import torch

    timestamps = gpu_timestamps()
    torch.cuda.synchronize()
    begun = now_ns()
    if before is not None:
        before()
    if timestamps is not None:
        timestamps.record(0)
    start.record()
    work()
    end.record()
    if timestamps is not None:
        timestamps.record(1)
    end.synchronize()
    reached = now_ns()
    torch.cuda.synchronize()
    idle = now_ns()
    return Clocks(
        events=float(start.elapsed_time(end)) * 1e-3,
        host=None if before is not None else (reached - begun) * 1e-9,
        counter=None if timestamps is None else timestamps.seconds(),
        late=(idle - reached) * 1e-9,
    )


class Timestamps:
    """Two readings of the GPU's counter, recorded on the current stream."""

    def __init__(self, kernel: Kernel) -> None:
        import torch

        self._values = torch.zeros(2, dtype=torch.int64, device="cuda")
        self._launch = kernel[1, 1]

    def record(self, index: int) -> None:
        self._launch(self._values, index)

    def seconds(self) -> float:
        first, second = self._values.tolist()
        return float(second - first) * 1e-9


@functools.cache
def gpu_timestamps() -> Timestamps | None:
    """Return timestamps, or None if this machine cannot compile their kernel."""
    from ..kernels.cuda_cpp import cuda_module
    from ..kernels.nvrtc import NoCompiler

    timestamps = Timestamps(cuda_module("probes.cu").stamp)
    try:
        timestamps.record(0)  # compiles the kernel
    except NoCompiler:
        return None
    return timestamps


BUSY_SHARE, BUSY_SECONDS = 0.20, 1e-6
"""The profiler's time may exceed the windows' time by this share, plus this many seconds.

The profiler's time includes the start and end of each kernel, and the GPU's clock frequency may
differ between the two measurements.
"""
PROFILE_WARMUP = 3
"""Calls before the profile starts, because the first calls may compile, tune or fill a cache."""
COMPUTE_CALLS = 3
"""Compute time is averaged over this many calls."""
NO_COMPUTE = (
    *("memcpy", "memset", "nccl", "nvshmem", "barrier", "spin_kernel"),
    *("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "all_to_all"),
)
"""Kernels whose names contain one of these move data, wait, or communicate with other ranks."""
NAME_LENGTH = 90
"""Kernel names are cut to this many characters, because template names have thousands."""


@dataclass(frozen=True)
class KernelProfile:
    """The kernels, copies and fills that a side launched on the GPU.

    Attributes:
        launches: number of launches per call, by name.
        busy: seconds per call during which at least one launch ran.
    """

    launches: Mapping[str, float]
    busy: float

    def contradiction(self, seconds: float) -> str:
        """Return the reason why `seconds` per call contradict this profile, or an empty string."""
        if not self.launches:
            return "nothing is launched on the GPU"
        if enabled("kernels-agree") and self.busy > seconds * (1 + BUSY_SHARE) + BUSY_SECONDS:
            return (
                f"kernels run for {self.busy * 1e6:.4g} us a call, but the windows measure"
                f" {seconds * 1e6:.4g} us"
            )
        return ""


def kernel_notes(by_side: Mapping[str, KernelProfile]) -> list[str]:
    """Return notes about the kernels that each side launches."""
    notes = []
    for name, profile in by_side.items():
        counts = ", ".join(f"{n:g} x {kernel}" for kernel, n in profile.launches.items())
        notes.append(f"{name} launches per call: {counts}; busy {duration(profile.busy)}")
    launches = [profile.launches for profile in by_side.values()]
    if len(launches) == 2 and launches[0] == launches[1]:
        notes.append("both sides launch the same kernels")
    return notes


def union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of ``(start, end)`` spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def summarize(events: Iterable[tuple[str, float, float]], calls: int) -> KernelProfile:
    """Return the profile of `calls` calls from ``(name, start, end)`` events in seconds."""
    events = list(events)
    counts = Counter(name[:NAME_LENGTH] for name, _, _ in events)
    launches = {name: count / calls for name, count in sorted(counts.items())}
    return KernelProfile(launches, union((start, end) for _, start, end in events) / calls)


def profile_kernels(
    work: Callable[[], object], calls: int, counts: Callable[[str], bool] = lambda name: True
) -> KernelProfile:
    """Profile `work`, which makes `calls` calls, and return its GPU launches per call.

    Args:
        counts: a function that returns True for the names of kernels to include.
    """
    import torch
    from torch.autograd.profiler import profile  # torch.profiler imports all of torch.compile

    torch.cuda.synchronize()
    with profile(use_cpu=False, use_device="cuda", use_kineto=True) as profiler:
        work()
        torch.cuda.synchronize()
    events = profiler.function_events or []
    on_gpu = [e for e in events if e.device_type.name == "CUDA" and counts(str(e.name))]
    spans = ((str(e.name), e.time_range.start * 1e-6, e.time_range.end * 1e-6) for e in on_gpu)
    return summarize(spans, calls)


def computes(name: str) -> bool:
    """Return False if `name` names a copy, fill, collective or wait, else True."""
    return not any(word in name.lower() for word in NO_COMPUTE)


def launches_per_call(pool: InputPool, side: Side) -> float:
    """Return the number of kernels, copies and fills in a warm call (maximum over the ranks)."""
    with _warm(pool, side) as call:
        return current_group().max(sum(profile_kernels(call, 1).launches.values()))


def compute_seconds(pool: InputPool, side: Side) -> float:
    """Return the seconds that kernels compute in a warm call (minimum over the ranks)."""
    with _warm(pool, side) as call:

        def work() -> None:
            for _ in range(COMPUTE_CALLS):
                call()

        busy = profile_kernels(work, COMPUTE_CALLS, computes).busy
        return -current_group().max(-busy)


@contextmanager
def _warm(pool: InputPool, side: Side) -> Iterator[Callable[[], object]]:
    with alone(pool, side) as bound:
        for _ in range(PROFILE_WARMUP):
            bound.run(0)
        yield lambda: bound.run(0)
