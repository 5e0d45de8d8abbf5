"""The history of one case over runs: its speedup, and each lasting change in the speedup."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from .change_points import change_points
from .history import CodeGate, HistoryLine, code_gate_between
from .row import ratio

State = Literal["confirmed", "refuted", "unconfirmed", "environment", "unexplained"]
HASH = 12
"""The number of a commit hash's digits that are printed."""


@dataclass(frozen=True)
class Change:
    """A lasting change in a case's level. The level is the ln(speedup) around which runs vary.

    Attributes:
        before, after: the last run at the old level, and the first run at the new level.
        old: the old level, in ln(speedup).
        size, low, high: new level minus old level, in ln(speedup), with its 99 % interval.
        differences: the environment facts, such as the driver, that differ between the two runs.
        sides: the sides (``baseline``, ``optimized``) whose source differs between the two runs.
        gate: the direct comparison of the code at the two runs' commits, or None.
    """

    before: HistoryLine
    after: HistoryLine
    old: float
    size: float
    low: float
    high: float
    differences: Sequence[str]
    sides: Sequence[str]
    gate: CodeGate | None

    @property
    def state(self) -> State:
        """The code gate's answer about the change, or the likely cause if there is no answer."""
        if self.gate is not None:
            return "confirmed" if self.gate.confirms(self.size) else "refuted"
        if self.sides:
            return "unconfirmed"
        return "environment" if self.differences else "unexplained"

    @property
    def is_certain(self) -> bool:
        """Whether the code gate need not, or did, confirm the change."""
        return self.state not in ("unconfirmed", "refuted")

    @property
    def command(self) -> str:
        """The command that measures both commits to confirm the change, or an empty string."""
        commits = (self.before.commit, self.after.commit)
        if not self.sides or not all(commits) or commits[0] == commits[1]:
            return ""
        if self.before.dirty or self.after.dirty:
            return ""
        old, new = (commit[:HASH] for commit in commits)
        case = shlex.quote(self.after.id)
        return f"git checkout {new} && pytest --aisp-against={old} --aisp-artifacts=DIR {case}"


@dataclass(frozen=True)
class CaseHistory:
    """The runs of one case, the oldest first, and the changes in the case's level."""

    lines: Sequence[HistoryLine]
    changes: Sequence[Change]

    @property
    def level(self) -> float:
        """The level since the last change, in ln(speedup)."""
        if self.changes:
            return self.changes[-1].old + self.changes[-1].size
        return median(line.value for line in self.lines)

    @property
    def is_lost(self) -> bool:
        """Whether the last change is a loss that the code gate confirmed."""
        last = self.changes[-1] if self.changes else None
        return last is not None and last.state == "confirmed" and last.size < 0


def of_lines(lines: Sequence[HistoryLine]) -> CaseHistory:
    """Return the history of one case from its lines, the oldest first.

    If a commit already has a run, a later run of the commit with ``--aisp-against`` only confirms a
    change. The later run is not a point of the history, because old code would then follow new
    code.
    """
    found, commits = list(lines), set[str]()
    lines = []
    for line in found:
        if line.code_gate is None or line.commit not in commits:
            lines.append(line)
        commits.add(line.commit)
    known = [
        at
        for at, (before, after) in enumerate(pairwise(lines), start=1)
        if after.differences(before) or after.changed_sides(before)
    ]
    points = change_points(
        [line.value for line in lines],
        [line.error for line in lines],
        session=lines[-1].session,
        known=known,
    )
    changes = []
    for point in points:
        before, after = lines[point.at - 1], lines[point.at]
        low, high = point.interval
        changes.append(
            Change(
                before=before,
                after=after,
                old=point.old,
                size=point.size,
                low=low,
                high=high,
                differences=after.differences(before),
                sides=after.changed_sides(before),
                gate=code_gate_between(found, before, after),
            )
        )
    return CaseHistory(lines, changes)


def change_text(change: Change) -> str:
    """Return a line about a change: its date, its size, what else changed, and its state."""
    size, low, high = (math.expm1(x) for x in (change.size, change.low, change.high))
    after, gate = change.after, change.gate
    commit = f" at {after.commit[:HASH]}" if after.commit else ""
    facts = [*change.differences, *(f"the source of {side} changed" for side in change.sides)]
    words = {
        "confirmed": f"confirmed by the code gate: {ratio(gate.effect if gate else 0.0)}",
        "refuted": f"not confirmed by the code gate: {ratio(gate.effect if gate else 0.0)}",
        "unconfirmed": "unconfirmed",
        "environment": "",
        "unexplained": "unexplained",
    }[change.state]
    line = (
        f"{after.started[:10]}{commit}: {ratio(change.old)} -> {ratio(change.old + change.size)},"
        f" {size:+.1%} [{low:+.1%}, {high:+.1%}]"
    )
    return "; ".join([line, *facts, *([words] if words else [])])
