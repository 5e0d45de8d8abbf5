"""Compare stored results with the claims of the current pages.

`aisp results expectations` compares each stored ln(speedup) with the current claim, and the stored
digests of source code with the current pages. The command also checks whether each result has
enough processes and sessions to estimate a spread.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ..results.models import ROLES, Result
from ..results.row import claim_text, digits
from ..results.verdict import NEUTRAL_FLOOR
from ..timing.peaks import Peaks
from ..timing.predict import EXPLAINED, Prediction
from ..util.cli_result import CliResult, columns
from .catalog import Catalog, CatalogCase
from .predictions import predicted_speedup, predicted_times
from .stored_results import chapters, interval_of, known_peaks

MIN_PROCESSES, MIN_SESSIONS = 8, 2
"""The minimum numbers of processes and sessions that are needed to estimate a spread."""
STATES = {
    "below": "the stored speedup is below the claim",
    "neutral": "a speedup is claimed, but the 99 % interval includes 1",
    "stale": "the sources of the sides have changed: record again",
    "few": f"fewer than {MIN_PROCESSES} processes or {MIN_SESSIONS} sessions",
    "unexplained": f"a stored time is more than {EXPLAINED:.0%} off the predicted time,"
    " and the page's section Seen does not name the side",
    "gone": "no page here has the case",
    "unread": "its page cannot be imported here, so its claim is unknown",
}
HEADS: tuple[str, ...] = ("product", "chapter", "case", "claim", "stored [99 %]", "predicted")
HEADS += ("processes", "sessions", "states")


@dataclass(frozen=True)
class Expectation:
    """A stored result and its claim.

    Attributes:
        states: the problems of the result, each a key of `STATES`.
        predicted: the speedup that the sides' costs predict, or None if a side has no prediction.
    """

    product: str
    chapter: str
    case: str
    claim: float | str | None
    speedup: float | None
    low: float | None
    high: float | None
    processes: int
    sessions: int
    states: tuple[str, ...]
    versus: str
    predicted: float | None

    def row(self) -> tuple[str, ...]:
        speed = "-"
        if self.speedup is not None:
            speed = f"{self.speedup:.3f}x [{self.low:.3f}, {self.high:.3f}]"
        claim = claim_text(self.claim, self.versus)
        predicted = "-" if self.predicted is None else f"{digits(self.predicted)}x"
        numbers = (predicted, str(self.processes), str(self.sessions))
        return self.product, self.chapter, self.case, claim, speed, *numbers, ", ".join(self.states)


def expectations_result(catalog: Catalog, archs: Mapping[str, str], *, form: str) -> CliResult:
    """Return the results of all products with their claims.

    The exit code is 1 if a result is below its claim.

    Args:
        archs: the arch whose claims apply, keyed by product.
    """
    entries = [e for product, arch in archs.items() for e in expectations(catalog, product, arch)]
    code = 1 if any("below" in one.states for one in entries) else 0
    if form == "json":
        return CliResult([json.dumps([asdict(one) for one in entries], indent=1)], code)
    return CliResult(_csv(entries) if form == "csv" else _text(entries), code)


def expectations(catalog: Catalog, product: str, arch: str) -> Iterator[Expectation]:
    """Yield each stored result of `product` with its claim."""
    cases = {(case.chapter, case.key): case for case in catalog.cases}
    unread = {Path(page.path).name for page in catalog.unread}
    peaks = known_peaks(catalog.baselines, product) or Peaks(product, {})
    for chapter in chapters(catalog.baselines, product):
        for key, result in sorted(chapter.stored.results.items()):
            case = cases.get((chapter.name, key))
            ends = interval_of(result, chapter.stored)
            # A claim is about a speedup, so it does not apply to a result that has only metrics.
            claim = None if case is None or ends is None else case.claims[arch]
            times = _predicted(case, result, peaks)
            states = _states(result, case, claim, ends[0] if ends else 0.0, times)
            if case is None and key.partition("::")[0] in unread:
                states = ["unread", *states[1:]]
            low, high = (None, None) if ends is None else map(math.exp, ends)
            yield Expectation(
                *(product, chapter.name, key, claim, result.speedup),
                *(low, high, result.processes, result.sessions),
                tuple(states),
                case.versus if case is not None else "",
                predicted_speedup(times),
            )


def _predicted(case: CatalogCase | None, result: Result, peaks: Peaks) -> dict[str, Prediction]:
    """Return the predicted times keyed by role. If a side has no prediction, return none."""
    if case is None or result.value is None:
        return {}
    times = predicted_times(case, result, peaks)
    known = {role: time for role, time in times.items() if isinstance(time, Prediction)}
    return known if len(known) == len(ROLES) else {}


def _states(
    result: Result,
    case: CatalogCase | None,
    claim: float | str | None,
    low: float,
    times: Mapping[str, Prediction],
) -> list[str]:
    timed = result.value is not None  # counted metrics have no spread
    few = timed and (result.processes < MIN_PROCESSES or result.sessions < MIN_SESSIONS)
    if case is None:
        return ["gone", *(["few"] if few else [])]
    states = {
        "below": _is_below(result, claim),
        "neutral": isinstance(claim, int | float) and claim >= 1 and low <= 0,
        "stale": bool(case.stale_roles(result)),
        "few": few,
        "unexplained": any(case.is_unexplained(r, t.seconds, result) for r, t in times.items()),
    }
    return [state for state, holds in states.items() if holds]


def _is_below(result: Result, claim: float | str | None) -> bool:
    """Return True if a result is below its claim.

    If the claim is `neutral`, a slowdown up to the clock's `NEUTRAL_FLOOR` is allowed.
    """
    if result.value is None or result.clock is None:
        return False
    if claim == "neutral":
        return result.value < -NEUTRAL_FLOOR[result.clock]
    # No margin is needed, because the claim was derived from this value (a mean over processes).
    return isinstance(claim, int | float) and result.value < math.log(claim)


def _csv(entries: Sequence[Expectation]) -> list[str]:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(Expectation)])
    for one in entries:
        plain = {**asdict(one), "states": " ".join(one.states)}
        writer.writerow(f"{v:.6g}" if isinstance(v, float) else v for v in plain.values())
    return text.getvalue().splitlines()


def _text(entries: Sequence[Expectation]) -> list[str]:
    """Return a table of the results with problems, and the number of results per problem."""
    problems = [one for one in entries if one.states]
    lines = columns([HEADS, *(one.row() for one in problems)]) if problems else []
    lines.append(f"{len(entries)} stored results, {len(entries) - len(problems)} without a problem")
    counts = {state: sum(state in one.states for one in problems) for state in STATES}
    return lines + [f"{state} {n}: {STATES[state]}" for state, n in counts.items() if n]
