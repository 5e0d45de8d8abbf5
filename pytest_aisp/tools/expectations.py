"""`aisp results expectations`: does each stored result show the benefit that its page claims?

What is held against what: the stored ln(speedup) against today's claim, its sides' sources against
today's pages, its processes and sessions against what a spread can be told from.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..results.metric_limits import METRICS
from ..results.models import Result, Stored, session_sd
from ..results.row import bare, duration
from ..results.store import load
from ..results.verdict import DEFAULT_SPREAD, NEUTRAL_FLOOR, interval
from ..util.cli_result import CliResult, columns
from . import stored_results
from .catalog import Catalog

FORMATS = ("text", "csv", "json")
PROCESSES, SESSIONS = 8, 2
"""What a case's spread is estimated from, at the least."""
STATES = {
    "below": "the stored speedup is below the claim",
    "neutral": "a speedup is claimed, and the 99 % interval holds none",
    "stale": "the digests of the sides' sources are others: record again",
    "few": f"fewer than {PROCESSES} processes or {SESSIONS} sessions",
    "gone": "no page here has the case",
    "unread": "its page cannot be imported here: nothing is known of its claim",
}
HEADS = ("product", "chapter", "case", "claim", "stored [99 %]", "processes", "sessions", "states")


@dataclass(frozen=True)
class Stand:
    """One stored result, and what there is to say of it; `states` is empty where all is well."""

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

    def row(self) -> tuple[str, ...]:
        """Return its line of the table."""
        speed = "-"
        if self.speedup is not None:
            speed = f"{self.speedup:.3f}x [{self.low:.3f}, {self.high:.3f}]"
        claim = "-" if self.claim is None else str(self.claim)
        counts = (str(self.processes), str(self.sessions))
        return self.product, self.chapter, self.case, claim, speed, *counts, ", ".join(self.states)


def expectations_result(found: Catalog, archs: Mapping[str, str], *, form: str) -> CliResult:
    """Return how the results of the products `archs` stand; exit code 1 where one is below.

    Args:
        archs: by product, the arch whose claims count.
    """
    stands = [s for product, arch in archs.items() for s in stands_of(found, product, arch)]
    code = 1 if any("below" in stand.states for stand in stands) else 0
    if form == "json":
        return CliResult([json.dumps([asdict(stand) for stand in stands], indent=1)], code)
    return CliResult(_csv(stands) if form == "csv" else _words(stands), code)


def stands_of(found: Catalog, product: str, arch: str) -> Iterator[Stand]:
    """Yield how each stored result of `product` stands."""
    cases = {(case["chapter"], case["key"]): case for case in found.cases}
    unread = {page["path"].rpartition("/")[2] for page in found.unread}
    for chapter in stored_results.chapters(found.baselines, product):
        for key, result in sorted(chapter.stored.results.items()):
            case = cases.get((chapter.name, key))
            ends = interval_of(result, chapter.stored)
            # A claim is of a speedup: a result of goals alone says nothing of it.
            claim = None if case is None or ends is None else case["claims"][arch]
            states = states_of(result, case, claim, ends[0] if ends else 0.0)
            low, high = (None, None) if ends is None else map(math.exp, ends)
            if case is None and key.partition("::")[0] in unread:
                states = ["unread", *states[1:]]
            yield Stand(
                *(product, chapter.name, key, claim, result.speedup),
                *(low, high, result.processes, result.sessions),
                tuple(states),
            )


def states_of(
    result: Result, case: Mapping[str, Any] | None, claim: float | str | None, low: float
) -> list[str]:
    """Return what there is to say of a result: words of `STATES`."""
    timed = result.value is not None  # what is counted does not scatter
    few = timed and (result.processes < PROCESSES or result.sessions < SESSIONS)
    if case is None:
        return ["gone", *(["few"] if few else [])]
    found = {
        "below": is_below(result, claim),
        "neutral": isinstance(claim, (int, float)) and low <= 0,
        "stale": dict(case["sources"]) != dict(result.sources),
        "few": few,
    }
    return [state for state, holds in found.items() if holds]


def is_below(result: Result, claim: float | str | None) -> bool:
    """Say whether a result is below a claim: a speedup, or no loss beyond the clock's floor."""
    if result.value is None or result.clock is None:
        return False
    if claim == "neutral":
        return result.value < -NEUTRAL_FLOOR[result.clock]
    # What is stored is a mean of processes, and what the claim was set from: no margin here.
    return isinstance(claim, (int, float)) and result.value < math.log(claim)


def _csv(stands: Sequence[Stand]) -> list[str]:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(Stand)])
    for stand in stands:
        plain = {**asdict(stand), "states": " ".join(stand.states)}
        writer.writerow(f"{v:.6g}" if isinstance(v, float) else v for v in plain.values())
    return text.getvalue().splitlines()


def _words(stands: Sequence[Stand]) -> list[str]:
    """Return a table of the results of which there is something to say, and a count of states."""
    said = [stand for stand in stands if stand.states]
    lines = columns([HEADS, *(stand.row() for stand in said)]) if said else []
    lines.append(f"{len(stands)} stored results, {len(stands) - len(said)} with nothing to say")
    counts = {state: sum(state in stand.states for stand in said) for state in STATES}
    return lines + [f"{state} {n}: {STATES[state]}" for state, n in counts.items() if n]


START, END = "<!-- results -->", "<!-- end of results -->"
TABLE_HEADS = ("page", "case", "baseline", "optimized", "speedup [99 %]", "share of limit", "clock")


class TableError(Exception):
    """A README without a place for the table."""


def table(chapter: str, baselines: Path) -> str:
    """Return the Markdown tables of every product that has results of `chapter`."""
    parts = []
    for path in sorted(baselines.glob(f"*/{chapter}.json")):
        stored = load(path)
        parts.append(f"**{stored.product}**, {_taken(stored)}\n")
        rows = [TABLE_HEADS, tuple("---" for _ in TABLE_HEADS)]
        rows += [_cells(key, stored) for key in sorted(stored.results)]
        parts.append("\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n")
    return "\n".join(parts) or "No results are stored yet.\n"


def _taken(stored: Stored) -> str:
    names = ("driver", "cuda", "torch", "triton")
    seen = [stored.environments[name] for name in sorted(stored.environments)]
    versions = {n: sorted({str(e[n]) for e in seen if e.get(n)}) for n in names}
    dates = sorted({str(e["date"]) for e in seen if e.get("date")})
    text = ", ".join(f"{n} {' / '.join(v)}" for n, v in versions.items() if v)
    return f"{text}; recorded {', '.join(dates)}"


def _cells(key: str, stored: Stored) -> tuple[str, ...]:
    page, _, case = key.partition("::")
    result = stored.results[key]
    share = "" if result.share is None else f"{result.share:.0%} {result.limit}"
    return (
        f"[{page.removesuffix('_test.py')}]({page})",
        case.partition("[")[2].rstrip("]"),
        *(_taken_by(result, side) for side in ("baseline", "optimized")),
        _speedup(result, stored),
        share,
        result.clock or "-",
    )


def _taken_by(result: Result, side: str) -> str:
    """Return a side's time; where nothing was timed, what it takes of each goal."""
    if side in result.seconds:
        return duration(result.seconds[side])
    return ", ".join(f"{name} {METRICS[name].unit(n[side])}" for name, n in result.goals.items())


def _speedup(result: Result, stored: Stored) -> str:
    ends = interval_of(result, stored)
    if result.value is None or ends is None:
        return "-"
    return f"{bare(result.value)}x [{bare(ends[0])}, {bare(ends[1])}]"


def interval_of(result: Result, stored: Stored) -> tuple[float, float] | None:
    """Return the 99 % interval of a result of `stored` in ln(speedup), sessions considered.

    None where nothing was timed.
    """
    if result.value is None or result.clock is None:
        return None
    return interval(
        result.value,
        result.own_spread or DEFAULT_SPREAD[result.clock],
        result.processes,
        session=session_sd(stored.results.values(), result.clock),
        sessions=result.sessions,
    )


def rewrite(readme: Path, baselines: Path) -> str:
    """Return the text of `readme` with its table as stored.

    Raises:
        TableError: when the markers are missing.
    """
    text = readme.read_text()
    if START not in text or END not in text:
        raise TableError(f"{readme} has no place for the table: add {START} and {END}")
    before, _, rest = text.partition(START)
    after = rest.partition(END)[2]
    return f"{before}{START}\n{table(readme.parent.name, baselines)}{END}{after}"


def main(arguments: list[str]) -> int:
    """Rewrite or check; return the exit code."""
    check = "--check" in arguments
    folders = [Path(a) for a in arguments if a != "--check"]
    readme = folders[0] / "README.md"
    baselines = folders[1] if len(folders) > 1 else Path("baselines")
    made = rewrite(readme, baselines)
    if check and made != readme.read_text():
        print(f"{readme} is out of step; python -m pytest_aisp.tools.expectations {folders[0]}")
        return 1
    if not check:
        readme.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


__all__ = ["TableError", "interval_of", "main", "rewrite", "table"]
