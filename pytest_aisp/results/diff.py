"""Compare two runs, or two states of the stored results, case by case.

The two runs or states were measured in different sessions. So a change within
`verdict.record_margin` counts as noise, as in a comparison of a run with stored results. Counted
goals, such as launches, have no noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import structs

from .metric_limits import METRICS
from .models import Stored, session_sd
from .results_json import Case
from .verdict import DEFAULT_SPREAD, RED, UNKNOWN_SESSION, record_margin

TIME_FLOOR = 0.05
"""The smallest noise assumed for a time. A speedup has less noise, because a change in the GPU's
clock rate changes both sides' times but not their ratio.

Times of the same kernel differ by up to 3.4 % from process to process (docs/explanation/spread.md).
"""
Outcome = Literal["worse", "better", "same"]
ORDER: tuple[Outcome, ...] = ("worse", "better", "same")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One case in one of two compared runs.

    Attributes:
        value: ln(speedup).
        seconds: seconds per call of ``baseline`` and ``optimized``, or empty.
        share: the share of the machine's `limit` that the optimized side reaches.
        goals: the amounts of both sides by metric, as in `Result.goals`.
        spread: the standard deviation of one process's ln(speedup).
        session: the standard deviation of ln(speedup) between sessions, if recorded.
        verdict: the verdict in a run, or empty for a stored result.
    """

    product: str
    chapter: str
    key: str
    clock: str = ""
    value: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    share: float | None = None
    limit: str = ""
    goals: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    spread: float | None = None
    session: float | None = None
    verdict: str = ""

    @property
    def name(self) -> tuple[str, str, str]:
        """The product, chapter and key, which identify the case in the other run."""
        return self.product, self.chapter, self.key


@dataclass(frozen=True)
class Change:
    """One metric of one case, old and new.

    Attributes:
        metric: ``speedup``, ``baseline time``, ``share of copy``, ``memory, optimized``, ...
        better: whether a higher or a lower value is better.
        unit: ``x``, ``s``, ``share``, or the name of the goal that determines the unit.
        noise: the largest relative change whose outcome is ``same``, or None for counted metrics.
    """

    case: Measured
    metric: str
    better: Literal["higher", "lower"]
    unit: str
    old: float
    new: float
    noise: float | None
    outcome: Outcome

    @property
    def change(self) -> float | None:
        """The relative change, such as 0.1 for 10 % more, or None if the old value is 0."""
        return self.new / self.old - 1 if self.old else None

    @property
    def size(self) -> float:
        """The change as a multiple of the noise. Changes are sorted by it."""
        if self.noise is None or not (self.old and self.new):
            return math.inf
        return abs(math.log(self.new / self.old)) / math.log1p(self.noise)


@dataclass(frozen=True)
class Turned:
    """A case that is red in only one of the two runs, with its verdict in each."""

    case: Measured
    old: str
    new: str
    outcome: Outcome


@dataclass(frozen=True)
class Comparison:
    """The changes of cases in both runs, and the cases that only one run has.

    Attributes:
        changes: regressions first (the largest at the top), then improvements, then the rest.
        turned: cases that turned red, then cases that turned green.
        apart: cases in both runs whose times cannot be compared, each with the reason.
    """

    changes: tuple[Change, ...]
    turned: tuple[Turned, ...]
    only_old: tuple[Measured, ...]
    only_new: tuple[Measured, ...]
    apart: tuple[tuple[Measured, str], ...]

    def count(self, outcome: Outcome) -> int:
        """Return the number of metrics and verdicts with this outcome."""
        every: tuple[Change | Turned, ...] = (*self.changes, *self.turned)
        return sum(found.outcome == outcome for found in every)


def of_run(cases: Iterable[Case]) -> Iterator[Measured]:
    """Yield the cases of a run's `results.json`."""
    for case in cases:
        speedup, seconds, limit = case.speedup, case.seconds, case.limit
        yield Measured(
            product=case.product,
            chapter=case.chapter,
            key=case.key,
            clock=case.clock,
            value=math.log(speedup.value) if speedup else None,
            seconds=structs.asdict(seconds) if seconds else {},
            share=limit.share if limit else None,
            limit=limit.name if limit else "",
            goals={name: msgspec.to_builtins(goal) for name, goal in case.goals.items()},
            spread=case.spread,
            session=case.session,
            verdict=case.verdict,
        )


def of_stored(stored: Stored, chapter: str) -> Iterator[Measured]:
    """Yield the stored results of one chapter, from the file ``<chapter>.json``."""
    for key, result in stored.results.items():
        yield Measured(
            product=stored.product,
            chapter=chapter,
            key=key,
            clock=result.clock or "",
            value=result.value,
            seconds=result.seconds,
            share=result.share,
            limit=result.limit or "",
            goals=result.goals,
            spread=result.own_spread,
            session=session_sd(stored.results.values(), result.clock, result)
            if result.clock
            else None,
        )


def compare(old: Iterable[Measured], new: Iterable[Measured]) -> Comparison:
    """Return the comparison of two runs, or of two states of the stored results."""
    before, after = ({case.name: case for case in side} for side in (old, new))
    both = [(before[name], after[name]) for name in before if name in after]
    changes = [change for pair in both for change in _changes(*pair)]
    turned = [turn for pair in both if (turn := _turned(*pair)) is not None]
    return Comparison(
        tuple(sorted(changes, key=lambda change: (ORDER.index(change.outcome), -change.size))),
        tuple(sorted(turned, key=lambda turn: ORDER.index(turn.outcome))),
        tuple(case for name, case in before.items() if name not in after),
        tuple(case for name, case in after.items() if name not in before),
        tuple((b, why) for a, b in both if (why := _why_apart(a, b))),
    )


def _why_apart(old: Measured, new: Measured) -> str:
    """Return the reason why a case's times cannot be compared, or an empty string."""
    untimed = [side for side, case in (("OLD", old), ("NEW", new)) if case.value is None]
    if len(untimed) == 1:
        verdict = (old if untimed == ["OLD"] else new).verdict
        return f"not timed in {untimed[0]}" + (f", where it is {verdict}" if verdict else "")
    if not untimed and old.clock != new.clock:
        return f"timed on the {old.clock} clock in OLD, on the {new.clock} clock in NEW"
    return ""


def _turned(old: Measured, new: Measured) -> Turned | None:
    """Return the case if it turned red or green, else None. A stored result counts as green."""
    was, is_ = old.verdict in RED, new.verdict in RED
    known = bool(old.verdict and new.verdict)
    if is_ and not was and (known or new.value is None):
        return Turned(new, old.verdict or "stored", new.verdict, "worse")
    if was and not is_ and (known or old.value is None):
        return Turned(new, old.verdict, new.verdict or "stored", "better")
    return None


def _changes(old: Measured, new: Measured) -> Iterator[Change]:
    yield from _counted(old, new)
    if old.value is None or new.value is None or old.clock != new.clock:
        return
    noise = math.expm1(margin(old, new))
    speedups = math.exp(old.value), math.exp(new.value)
    yield _timed(new, "speedup", "x", *speedups, noise, higher=True)
    noise = max(noise, TIME_FLOOR)
    for side in old.seconds:
        seconds = old.seconds[side], new.seconds[side]
        yield _timed(new, f"{side} time", "s", *seconds, noise, higher=False)
    if old.share and new.share and old.limit == new.limit:
        shares = old.share, new.share
        yield _timed(new, f"share of {new.limit}", "share", *shares, noise, higher=True)


def margin(old: Measured, new: Measured) -> float:
    """Return the largest difference in ln(speedup) that counts as noise."""
    spreads = [case.spread for case in (old, new) if case.spread is not None]
    sessions = [case.session for case in (old, new) if case.session is not None]
    spread = max(spreads, default=DEFAULT_SPREAD[new.clock])
    return record_margin(spread, max(sessions, default=UNKNOWN_SESSION[new.clock]), new.clock)


def _timed(
    case: Measured, metric: str, unit: str, old: float, new: float, noise: float, *, higher: bool
) -> Change:
    gain = math.log(new / old) * (1 if higher else -1)
    limit = math.log1p(noise)
    outcome: Outcome = "worse" if gain < -limit else "better" if gain > limit else "same"
    return Change(case, metric, "higher" if higher else "lower", unit, old, new, noise, outcome)


def _counted(old: Measured, new: Measured) -> Iterator[Change]:
    for name, goal in METRICS.items():
        before, after = old.goals.get(name, {}), new.goals.get(name, {})
        for side in ("baseline", "optimized"):
            if side not in before or side not in after:
                continue
            was, is_ = (
                {"optimized": found[side], "noise": found.get("noise", 0.0)}
                for found in (before, after)
            )
            worse, better = goal.worse(was, is_), goal.worse(is_, was)
            outcome: Outcome = "worse" if worse else "better" if better else "same"
            higher: Literal["higher", "lower"] = "higher" if goal.rises else "lower"
            numbers = before[side], after[side], None
            yield Change(new, f"{name}, {side}", higher, name, *numbers, outcome)
