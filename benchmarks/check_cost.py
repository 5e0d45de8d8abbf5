"""Print how much time cases spend in each phase, from the artifacts of a run.

    pytest suites/ch01 --aisp-artifacts=DIR
    python benchmarks/check_cost.py DIR

Prints the median seconds and share of each phase, and the share of the phases that only protect
against mistakes and cheats. A plain measurement would not have these phases.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from pytest_aisp.results import run_reader

GUARDS = ("verify", "repeats", "clocks", "controls", "neighbors")
"""Phases that detect cheats. `check` and `reference` prove results, `time` and `build` measure."""


def phases(row: dict[str, Any]) -> dict[str, float]:
    """Return the seconds by phase of a row's first check and first timing."""
    total: dict[str, float] = defaultdict(float)
    for reply in (row.checks[:1], row.timings[:1]):
        for answer in reply:
            for phase, seconds in answer.get("spent", {}).items():
                total[phase] += seconds
    return dict(total)


def main(path: Path) -> None:
    try:
        rows = list(run_reader.load(path).rows())
    except run_reader.RunError as error:
        sys.exit(str(error))
    cases = [phases(row) for row in rows if row.timings]
    if not cases:
        sys.exit(f"{path}: no case was timed")
    names = sorted({name for case in cases for name in case})
    print(
        f"{len(cases)} cases, median {median(sum(c.values()) for c in cases):.3f} s in the worker"
    )
    for name in names:
        seconds = median(case.get(name, 0.0) for case in cases)
        share = median(case.get(name, 0.0) / sum(case.values()) for case in cases)
        print(f"{name:12} {seconds:7.3f} s {share:6.1%}")
    guards = median(sum(case.get(g, 0.0) for g in GUARDS) / sum(case.values()) for case in cases)
    print(f"guards ({', '.join(GUARDS)}): {guards:.1%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
