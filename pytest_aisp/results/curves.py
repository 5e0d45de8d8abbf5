"""Curves: the speedups of a page with ``sweep=KEY``, one point for each value of that size key.

A curve belongs to one test function, one variant, and one choice of the other keys of the size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .row import CaseRecord, bare, size_text

KNEE = 0.95
"""The knee of a curve is the first point whose speedup is at least this share of the best one."""


class Point(NamedTuple):
    """A value of the swept key, with ln(speedup) and its 99 % interval."""

    at: object
    value: float
    low: float
    high: float


class Curve(NamedTuple):
    """The points of one variant over the swept key, in the order of the key's values."""

    function: str
    variant: str
    fixed: str
    key: str
    points: Sequence[Point]

    def __str__(self) -> str:
        best = max(self.points, key=lambda point: point.value)
        knee = next(p for p in self.points if p.value >= best.value + math.log(KNEE))
        first, last = self.points[0].at, self.points[-1].at
        fixed = f" at {self.fixed}" if self.fixed else ""
        text = (
            f"{self.function}[{self.variant}]{fixed} over {self.key} {first} to {last}:"
            f" best {bare(best.value)}x at {best.at}, knee {knee.at}"
        )
        if crossed := self.crossings():
            text += f", crosses 1x between {' and '.join(crossed)}"
        return text

    def crossings(self) -> list[str]:
        """Return the pairs of values between which the speedup crosses 1, such as ``64 and 128``.

        Points whose 99 % interval contains 1 are skipped.
        """
        decided = [point for point in self.points if point.low > 0 or point.high < 0]
        pairs = itertools.pairwise(decided)
        return [f"{a.at} and {b.at}" for a, b in pairs if (a.low > 0) != (b.low > 0)]


def curves(records: Iterable[CaseRecord]) -> list[Curve]:
    """Return the curves that have at least three timed points, in the order of `records`."""
    points: dict[tuple[str, ...], list[Point]] = {}
    for record in records:
        if not record.sweep or record.value is None or record.low is None or record.high is None:
            continue
        at = record.size.get(record.sweep)
        rest = {key: value for key, value in record.size.items() if key != record.sweep}
        fixed = size_text(record.gpus, rest)
        curve = record.file, record.function, record.variant, fixed, record.sweep
        points.setdefault(curve, []).append(Point(at, record.value, record.low, record.high))
    return [
        Curve(function, variant, fixed, key, in_order(found))
        for (_, function, variant, fixed, key), found in points.items()
        if len(found) > 2
    ]


def in_order(points: Sequence[Point]) -> list[Point]:
    """Return `points` sorted by the key's value if all values are numbers, else unsorted."""
    if any(isinstance(p.at, bool) or not isinstance(p.at, (int, float)) for p in points):
        return list(points)
    return sorted(points, key=lambda point: float(str(point.at)))
