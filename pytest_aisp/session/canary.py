"""The gate is gated: each run times one side against itself, once alike and once slowed down.

The first must pass as no difference, the second must become a suspect; otherwise no verdict of the
run counts. docs/explanation/verdict.md has the chance that either goes wrong by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..results import verdict
from ..results.row import ratio
from ..results.verdict import Reading
from .run_context import Failed

if TYPE_CHECKING:
    from .case import CaseRun

ATTEMPTS = 4
"""Processes in which the planted slowdown may be seen."""
CLOCKS = ("graph", "queue", "host", "cpu")
"""Clocks on which a slowdown can be planted, the most precise first."""

Itself = Callable[[float, bool], tuple[Reading, float]]
"""Time a side against itself: given the share to plant and whether to ask a fresh process, return
what that said and the share that was planted, which is a whole number of calls."""


@dataclass
class Canary:
    """What became of one process's canary, in plain types.

    Attributes:
        case: id of the case whose optimized side was used; clock: by which clock.
        same: ln(speedup) of the side against its copy; votes: those of fresh processes.
        planted: share of calls planted in the copy; seen: ln(speedup) of each attempt to see it.
        wrong: what misbehaved, or empty.
    """

    case: str
    clock: str
    same: float | None = None
    votes: list[float] = field(default_factory=list)
    planted: float = 0.0
    seen: list[float] = field(default_factory=list)
    wrong: str = ""

    def __str__(self) -> str:
        if self.wrong:
            return f"{self.case} on the {self.clock} clock: {self.wrong}"
        return (
            f"{self.case} on the {self.clock} clock: against itself {ratio(self.same or 0.0)},"
            f" with {self.planted:.1%} planted {ratio(self.seen[-1])}"
        )


def offer_to_canary(case: CaseRun) -> None:
    """Keep `case` for this process's canary if it has the finest time scale so far."""
    if case.timing is not None and case.timing.clock in CLOCKS:
        best = case.run.finest
        if best is None or _coarseness(case) < _coarseness(best):
            case.run.finest = case


def _coarseness(case: CaseRun) -> tuple[int, float]:
    # A short call fills a window many times, so that one in a hundred can be planted.
    assert case.timing is not None
    return CLOCKS.index(case.timing.clock), case.timing.pair_seconds[1]


def run_canary(case: CaseRun) -> dict[str, Any]:
    """Time the optimized side of `case`, which this process has measured, against itself."""
    assert case.timing is not None
    client, numbers = case.client, iter(range(100))
    found = Canary(case.location.nodeid.rpartition("::")[2], case.timing.clock)

    def itself(planted: float, fresh: bool) -> tuple[Reading, float]:
        if not fresh:
            return client.time_itself(planted, next(numbers))
        worker = client.fresh_worker()
        try:
            return client.time_itself(planted, next(numbers), worker)
        finally:
            worker.close()

    try:
        judge(found, case.timing.spread, itself)
    except Failed as failure:
        found.wrong = f"cannot be timed again: {str(failure).splitlines()[0]}"
    return asdict(found)


def judge(found: Canary, spread: float, itself: Itself) -> None:
    """Fill `found` with what `itself` says of a side whose processes scatter by `spread`."""
    first, _ = itself(0.0, False)
    spread = verdict.effective_spread(spread, first)  # as restless as it is now
    gates = verdict.same_gates(spread)
    decision = verdict.decide(first, gates, lambda: itself(0.0, True)[0])
    found.same, found.votes = first.value, [vote.value for vote in decision.votes]
    if "red" in decision.outcomes.values():
        found.wrong = f"a side differs from itself: {', '.join(map(ratio, found.votes))}"
        return
    for attempt in range(ATTEMPTS):
        seen, found.planted = itself(verdict.planted_share(spread), attempt > 0)
        found.seen.append(seen.value)
        if verdict.sees(seen, spread):
            return
    read = ", ".join(map(ratio, found.seen))
    found.wrong = f"a planted slowdown of {found.planted:.1%} is not seen: {read}"
