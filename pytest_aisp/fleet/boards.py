"""Compare the boards of one product: a table from results that were recorded on several boards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

from ..results.models import Stored
from ..tools.stored_results import chapters
from ..util.cli_result import CliError, CliResult, columns

HEADING = ("product", "board", "cases", "median", "worst", "on")


@dataclass
class Board:
    """The stored values of one board, compared with the other boards of its product.

    Attributes:
        shifts: for each case, ln(speedup) on this board minus the mean over the other boards.
    """

    shifts: dict[str, float] = field(default_factory=dict)

    def row(self, product: str, name: str) -> tuple[str, ...]:
        """Return the board's row of the table."""
        worst = max(self.shifts, key=lambda key: abs(self.shifts[key]))
        middle = median(self.shifts.values())
        return (
            product,
            name,
            str(len(self.shifts)),
            _percent(middle),
            _percent(self.shifts[worst]),
            worst,
        )


def _percent(shift: float) -> str:
    return f"{math.expm1(shift):+.2%}"


def boards_of(stored: Mapping[str, Stored]) -> dict[str, Board]:
    """Return the boards of one product, by name. Cases recorded on only one board are left out.

    Args:
        stored: the product's stored results, by chapter.
    """
    boards: dict[str, Board] = defaultdict(Board)
    for chapter, file in stored.items():
        for key, result in file.results.items():
            values: dict[str, list[float]] = defaultdict(list)
            for name, session in zip(result.environments, result.values, strict=False):
                if (board := file.environments[name].get("board")) is not None:
                    values[str(board)].append(fmean(session))
            means = {board: fmean(each) for board, each in values.items()}
            for board, mean in means.items():
                others = [means[other] for other in means if other != board]
                if others:
                    boards[board].shifts[f"{chapter}/{key}"] = mean - fmean(others)
    return dict(boards)


def boards_result(baselines: Path, product: str | None) -> CliResult:
    """Return the table for one product, or for all products with stored results.

    Raises:
        CliError: if a file cannot be read, or no case was recorded on two boards.
    """
    rows: list[tuple[str, ...]] = [HEADING]
    stored: dict[str, dict[str, Stored]] = defaultdict(dict)
    for chapter in chapters(baselines, product):
        stored[chapter.path.parent.name][chapter.name] = chapter.stored
    for name, files in sorted(stored.items()):
        found = boards_of(files)
        slowest_first = sorted(found, key=lambda board: median(found[board].shifts.values()))
        rows += [found[board].row(name, board) for board in slowest_first]
    if len(rows) == 1:
        raise CliError(
            f"no case in {baselines} was recorded on two boards\nRecord by a fleet:\n"
            "    pytest --aisp-fleet --aisp-update-expectations"
        )
    note = "median and worst: the speedup on this board against the mean of the other boards"
    return CliResult([*columns(rows), note])
