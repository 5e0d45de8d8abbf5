"""The results table of a chapter's README, generated from the stored results.

    python -m pytest_aisp.results.tables suites/ch01 [baselines]   rewrite the table
    python -m pytest_aisp.results.tables --check suites/ch01       fail if it is not what is stored

The table stands between `<!-- results -->` and `<!-- end of results -->`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from . import store
from .goals import GOALS
from .row import bare, duration
from .stored import Result, Stored, session_sd
from .verdict import DEFAULT_SPREAD, interval

START, END = "<!-- results -->", "<!-- end of results -->"
HEADS = ("page", "case", "baseline", "optimized", "speedup [99 %]", "share of limit", "clock")


class TableError(Exception):
    """A README without a place for the table."""


def table(chapter: str, baselines: Path) -> str:
    """Return the Markdown tables of every product that has results of `chapter`."""
    parts = []
    for file in sorted(baselines.glob(f"*/{chapter}.json")):
        stored = store.load(file)
        parts.append(f"**{stored.product}**, {_taken(stored)}\n")
        rows = [HEADS, tuple("---" for _ in HEADS)]
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
    return ", ".join(f"{name} {GOALS[name].unit(n[side])}" for name, n in result.goals.items())


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
        print(f"{readme} is out of step; python -m pytest_aisp.results.tables {folders[0]}")
        return 1
    if not check:
        readme.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


__all__ = ["TableError", "interval_of", "main", "rewrite", "table"]
