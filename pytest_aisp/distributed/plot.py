"""Draw a plot of bus bandwidth by size as an SVG."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..util.cli_result import size_text
from ..util.svg import GRAY, GRID, INK, circle, decades, line, log_fraction, opening, si, text

if TYPE_CHECKING:
    from .nccl import SweepRow

WIDTH, HEIGHT = 900, 520
LEFT, RIGHT, TOP, BOTTOM = 90, 740, 64, 450
COLORS = {"all_reduce": "#0969da", "all_gather": "#1a7f37", "reduce_scatter": "#bc4c00"}
COLORS |= {"all_to_all": "#8250df", "one_shot": "#cf222e"}
STEP = 18
"""The smallest vertical distance in pixels between the names of two curves."""


Point = tuple[float, float]


def draw(rows: Sequence[SweepRow], title: str) -> str:
    """Return an SVG that plots `busbw` against size, with one curve for each collective."""
    sizes, rates = [row["size"] for row in rows], [row["busbw"] for row in rows]
    across, up = (min(sizes) / 1.5, max(sizes) * 1.5), (min(rates) / 2, max(rates) * 2)
    curves: dict[str, list[Point]] = {}
    for row in rows:
        x = LEFT + log_fraction(row["size"], *across) * (RIGHT - LEFT)
        y = BOTTOM - log_fraction(row["busbw"], *up) * (BOTTOM - TOP)
        curves.setdefault(row["op"], []).append((x, y))
    parts = [
        *opening(WIDTH, HEIGHT),
        text(LEFT, 30, "Bus bandwidth of collectives", size=20, weight="bold"),
        text(LEFT, 50, title, size=12, fill=GRAY),
        *_grid(sorted(set(sizes)), across, up),
        *_curves(curves),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _grid(sizes: Sequence[int], across: Point, up: Point) -> Iterator[str]:
    for size in sizes[:: max(1, len(sizes) // 8)]:
        x = LEFT + log_fraction(size, *across) * (RIGHT - LEFT)
        yield line(x, TOP, x, BOTTOM, GRID)
        yield text(x, BOTTOM + 18, size_text(size), anchor="middle", size=12)
    for rate in decades(*up):
        y = BOTTOM - log_fraction(rate, *up) * (BOTTOM - TOP)
        yield line(LEFT, y, RIGHT, y, GRID)
        yield text(LEFT - 8, y + 4, f"{si(rate)}B/s", anchor="end", size=12)
    yield line(LEFT, BOTTOM, RIGHT, BOTTOM, GRAY)
    yield line(LEFT, TOP, LEFT, BOTTOM, GRAY)
    yield text((LEFT + RIGHT) / 2, BOTTOM + 42, "size in bytes per rank", anchor="middle")


def _curves(curves: Mapping[str, Sequence[Point]]) -> Iterator[str]:
    names = sorted(curves, key=lambda op: curves[op][-1][1])  # the highest curve first
    last = float(TOP - STEP)
    for op in names:
        points, color = curves[op], COLORS.get(op, INK)
        dash = "5 4" if op == "one_shot" else ""
        for (x1, y1), (x2, y2) in itertools.pairwise(points):
            yield line(x1, y1, x2, y2, color, width=2, dash=dash)
        yield from (circle(x, y, 2.6, color, color) for x, y in points)
        last = max(last + STEP, points[-1][1] + 4)
        yield text(RIGHT + 10, last, op, fill=color, size=12, weight="bold")
