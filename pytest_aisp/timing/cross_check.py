"""Three clocks for one stretch of GPU work: events, the host between full waits, the GPU's counter.

Whoever fools one of them does not fool the others: work on a stream of its own is late for the
events, replaced events are contradicted by host and counter, a replaced host clock by both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..isolation.monkeypatches import now_ns
from ..isolation.protections import enabled
from ..util.process_group import current_group

if TYPE_CHECKING:
    import torch

STRETCH = 5e-3
"""Least seconds of work that the clocks are compared over."""
SHARE = 0.02
"""By which share of that they may differ ..."""
HOST, COUNTER = 150e-6, 60e-6
"""... and by how many seconds besides: launching, and starting and ending a stamp."""
LATE, LATE_QUEUED, LATE_ON_RANKS = 50e-6, 30e-6, 150e-6
"""Seconds that an idle GPU may take to say so once the last event has been reached, besides that
share of the work. No share is added for queued calls, since a stream of its own is late by no more
than its last call, however many there were; in a graph no such stream can be captured. Beside NCCL
it took 50 to 120 us, and 450 after 0.2 s of its calls."""
ATTEMPTS = 5
"""A host that was busy elsewhere for a moment accuses nobody."""


@dataclass(frozen=True)
class Clocks:
    """Seconds that the same work took.

    Attributes:
        events: between two events on the side's stream.
        host: on the host, idle before, until the second event was reached; None where the host
            waited for something else too.
        counter: between two stamps on that stream; None where stamps cannot be compiled.
        late: from the second event until the whole device was idle.
        queued: whether the calls were launched one by one.
    """

    events: float
    host: float | None
    counter: float | None
    late: float
    queued: bool = False

    @property
    def patience(self) -> float:
        """Seconds that `late` may be."""
        if current_group().world > 1:
            return SHARE * self.events + LATE_ON_RANKS
        return LATE_QUEUED if self.queued else SHARE * self.events + LATE

    def contradiction(self) -> str:
        """Return what contradicts the events in words, or nothing."""
        margin = SHARE * self.events
        if enabled("no-late-work") and self.late > self.patience:
            return (
                f"work goes on for {self.late * 1e6:.3g} us after the last call of"
                f" {self.events * 1e6:.4g} us: a stream of its own is not waited for"
            )
        if not enabled("clocks-agree"):
            return ""
        if self.host is not None and not -margin < self.host - self.events < margin + HOST:
            return (
                f"events say {self.events * 1e6:.4g} us,"
                f" the host between full waits {self.host * 1e6:.4g} us"
            )
        if self.counter is not None and abs(self.counter - self.events) > margin + COUNTER:
            return (
                f"events say {self.events * 1e6:.4g} us,"
                f" the GPU's own counter {self.counter * 1e6:.4g} us"
            )
        return ""


def contradiction(read: Callable[[], Clocks]) -> str:
    """Return what contradicts the events each time that the clocks are read, or nothing."""
    found = ""
    for _ in range(ATTEMPTS):
        found = current_group().first_message(read().contradiction() or None) or ""
        if not found:
            return ""
    return found


def read_clocks(
    work: Callable[[], None],
    start: torch.cuda.Event,
    end: torch.cuda.Event,
    before: Callable[[], None] | None = None,
) -> Clocks:
    """Return what the clocks say of the GPU work that `work` launches on the current stream.

    Args:
        before: launches what is not timed, behind which the work waits; the host's clock then says
            nothing.
    """
    import torch

    stamp = stamper()
    torch.cuda.synchronize()
    begun = now_ns()
    if before is not None:
        before()
    if stamp is not None:
        stamp(0)
    start.record()
    work()
    end.record()
    if stamp is not None:
        stamp(1)
    end.synchronize()
    reached = now_ns()
    torch.cuda.synchronize()
    idle = now_ns()
    return Clocks(
        events=float(start.elapsed_time(end)) * 1e-3,
        host=None if before is not None else (reached - begun) * 1e-9,
        counter=None if stamp is None else stamp.seconds(),
        late=(idle - reached) * 1e-9,
    )


class _Stamper:
    """Stamps of the GPU's counter on the current stream."""

    def __init__(self, kernel: Any) -> None:
        import torch

        self._at = torch.zeros(2, dtype=torch.int64, device="cuda")
        self._kernel = kernel[1, 1]

    def __call__(self, index: int) -> None:
        self._kernel(self._at, index)

    def seconds(self) -> float:
        """Return the seconds between stamps 0 and 1."""
        first, second = self._at.tolist()
        return float(second - first) * 1e-9


@functools.cache
def stamper() -> _Stamper | None:
    """Return what stamps, or None where this machine cannot compile it."""
    from ..kernels.cuda_cpp import cuda_module
    from ..kernels.nvrtc import NoCompiler

    try:
        made = _Stamper(cuda_module("probes.cu").stamp)
        made(0)  # compiles
    except NoCompiler:
        return None
    return made
