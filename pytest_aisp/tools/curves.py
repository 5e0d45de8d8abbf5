"""The plot of `aisp nccl`: busbw over size, a curve for each collective, both logarithmic."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..common.answers import size_text
from . import svg

WIDTH, HEIGHT = 900, 520
LEFT, RIGHT, TOP, BOTTOM = 90, 740, 64, 450
COLORS = {"all_reduce": "#0969da", "all_gather": "#1a7f37", "reduce_scatter": "#bc4c00"}
COLORS |= {"all_to_all": "#8250df", "one_shot": "#cf222e"}
STEP = 18
"""Pixels between the names of two curves."""

Row = Mapping[str, Any]
Point = tuple[float, float]


def draw(rows: Sequence[Row], title: str) -> str:
    """Return the SVG of `rows`, which have `op`, `size` in bytes and `busbw` in bytes/s."""
    sizes, rates = [row["size"] for row in rows], [row["busbw"] for row in rows]
    across, up = (min(sizes) / 1.5, max(sizes) * 1.5), (min(rates) / 2, max(rates) * 2)
    curves: dict[str, list[Point]] = {}
    for row in rows:
        x = LEFT + svg.part(row["size"], *across) * (RIGHT - LEFT)
        y = BOTTOM - svg.part(row["busbw"], *up) * (BOTTOM - TOP)
        curves.setdefault(row["op"], []).append((x, y))
    parts = [
        *svg.opening(WIDTH, HEIGHT),
        svg.text(LEFT, 30, "Bus bandwidth of collectives", size=20, weight="bold"),
        svg.text(LEFT, 50, title, size=12, fill=svg.GRAY),
        *_grid(sorted(set(sizes)), across, up),
        *_curves(curves),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _grid(sizes: Sequence[int], across: Point, up: Point) -> Iterator[str]:
    for size in sizes[:: max(1, len(sizes) // 8)]:
        x = LEFT + svg.part(size, *across) * (RIGHT - LEFT)
        yield svg.line(x, TOP, x, BOTTOM, svg.GRID)
        yield svg.text(x, BOTTOM + 18, size_text(size), anchor="middle", size=12)
    for rate in svg.decades(*up):
        y = BOTTOM - svg.part(rate, *up) * (BOTTOM - TOP)
        yield svg.line(LEFT, y, RIGHT, y, svg.GRID)
        yield svg.text(LEFT - 8, y + 4, f"{svg.si(rate)}B/s", anchor="end", size=12)
    yield svg.line(LEFT, BOTTOM, RIGHT, BOTTOM, svg.GRAY)
    yield svg.line(LEFT, TOP, LEFT, BOTTOM, svg.GRAY)
    yield svg.text((LEFT + RIGHT) / 2, BOTTOM + 42, "size in bytes a rank", anchor="middle")


def _curves(curves: Mapping[str, Sequence[Point]]) -> Iterator[str]:
    names = sorted(curves, key=lambda op: curves[op][-1][1])  # the fastest on top, as it ends
    last = float(TOP - STEP)
    for op in names:
        points, color = curves[op], COLORS.get(op, svg.INK)
        dash = "5 4" if op == "one_shot" else ""
        for (x1, y1), (x2, y2) in itertools.pairwise(points):
            yield svg.line(x1, y1, x2, y2, color, width=2, dash=dash)
        yield from (svg.circle(x, y, 2.6, color, color) for x, y in points)
        last = max(last + STEP, points[-1][1] + 4)
        yield svg.text(RIGHT + 10, last, op, fill=color, size=12, weight="bold")
