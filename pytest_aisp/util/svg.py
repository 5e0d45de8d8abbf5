"""The elements of an SVG, and the numbers on its axes."""

from __future__ import annotations

import math
from html import escape

INK, GRAY, GRID = "#1f2328", "#59636e", "#e4e8ec"
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def decades(low: float, high: float) -> list[float]:
    """Return the powers of ten from `low` to `high`."""
    return [10.0**d for d in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]


def ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times each power of ten, from `low` to `high`."""
    steps = (step * power for power in decades(low / 10, high) for step in (1, 2, 5))
    return [tick for tick in steps if low <= tick <= high]


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

    `turn` rotates the text around the point. `by` shifts the text within the rotated axes.
    """
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}"'
    style += f' transform="rotate({turn:.2f} {x:.1f} {y:.1f})"' if turn else ""
    style += f' stroke="{stroke}" stroke-width="3"' if stroke else ""
    return f'<text x="{x + by[0]:.1f}" y="{y + by[1]:.1f}" {style}>{escape(words)}</text>'
