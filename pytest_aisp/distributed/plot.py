"""Draw the plot of bandwidths as an SVG, and the SVG elements that it needs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from ..util.cli_result import size_text

if TYPE_CHECKING:
    from .nccl import SweepRow

INK, GRAY, GRID = "#1f2328", "#59636e", "#e4e8ec"
WIDTH, HEIGHT = 900, 520
LEFT, RIGHT, TOP, BOTTOM = 90, 740, 64, 450
COLORS = {"all_reduce": "#0969da", "all_gather": "#1a7f37", "reduce_scatter": "#bc4c00"}
COLORS |= {"all_to_all": "#8250df", "one_shot": "#cf222e"}
STEP = 18
"""The smallest vertical distance in pixels between the names of two curves."""
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def decades(low: float, high: float) -> list[float]:
    """Return the powers of ten from `low` to `high`."""
    return [10.0**d for d in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]


def log_fraction(value: float, low: float, high: float) -> float:
    """Return the position of `value` on a logarithmic axis from `low` (0) to `high` (1)."""
    return math.log(value / low) / math.log(high / low)


def si(value: float) -> str:
    """Return `value` with three digits and an SI prefix, such as ``4.24 T``."""
    scale, prefix = next(((s, p) for s, p in PREFIXES if value >= s), (1.0, ""))
    return f"{value / scale:.3g} {prefix}"


def opening(width: float, height: float) -> list[str]:
    """Return the first lines of an SVG of this size. The caller must add the end tag."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]


def line(
    x1: float, y1: float, x2: float, y2: float, color: str, *, width: float = 1, dash: str = ""
) -> str:
    """Return the SVG element of a straight line."""
    points = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line {points} stroke="{color}" stroke-width="{width}"{dashed}/>'


def circle(x: float, y: float, radius: float, color: str, fill: str) -> str:
    """Return the SVG element of a circle whose outline has `color`."""
    center = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius}"'
    return f'<circle {center} stroke="{color}" stroke-width="1.8" fill="{fill}"/>'


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: float = 13,
    anchor: str = "start",
    weight: str = "normal",
    fill: str = INK,
    stroke: str = "",
    turn: float = 0,
    by: tuple[float, float] = (0, 0),
) -> str:
    """Return the SVG element of `words` at a point.

    `turn` rotates the text around the point. `by` shifts it within the rotated axes.
    """
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}"'
    style += f' transform="rotate({turn:.2f} {x:.1f} {y:.1f})"' if turn else ""
    style += f' stroke="{stroke}" stroke-width="3"' if stroke else ""
    return f'<text x="{x + by[0]:.1f}" y="{y + by[1]:.1f}" {style}>{escape(words)}</text>'


Point = tuple[float, float]


def draw(rows: Sequence[SweepRow], title: str) -> str:
    """Return the SVG, which plots `busbw` against size in one curve for each collective."""
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
    yield text((LEFT + RIGHT) / 2, BOTTOM + 42, "size in bytes a rank", anchor="middle")


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
