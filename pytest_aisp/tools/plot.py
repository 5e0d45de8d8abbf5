"""Lines, circles and texts of an SVG, and the ticks of a logarithmic axis."""

from __future__ import annotations

import math
from html import escape

INK, GRAY, GRID = "#1f2328", "#59636e", "#e4e8ec"
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def decades(low: float, high: float) -> list[float]:
    """Return the powers of ten between two amounts."""
    return [10.0**d for d in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]


def part(value: float, low: float, high: float) -> float:
    """Return where `value` lies between `low` (0) and `high` (1), logarithmically."""
    return math.log(value / low) / math.log(high / low)


def si(value: float) -> str:
    """Return ``4.24 T``: three digits and the prefix that suits them."""
    scale, prefix = next(((s, p) for s, p in PREFIXES if value >= s), (1.0, ""))
    return f"{value / scale:.3g} {prefix}"


def opening(width: float, height: float) -> list[str]:
    """Return the first elements of an SVG of this size: white ground, and no end yet."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]


def line(
    x1: float, y1: float, x2: float, y2: float, color: str, *, width: float = 1, dash: str = ""
) -> str:
    """Return a straight line."""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line {ends} stroke="{color}" stroke-width="{width}"{dashed}/>'


def circle(x: float, y: float, radius: float, color: str, fill: str) -> str:
    """Return a circle with an edge of `color`."""
    place = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius}"'
    return f'<circle {place} stroke="{color}" stroke-width="1.8" fill="{fill}"/>'


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
    """Return `words` at a point, turned around it, and moved `by` in its own direction."""
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}"'
    style += f' transform="rotate({turn:.2f} {x:.1f} {y:.1f})"' if turn else ""
    style += f' stroke="{stroke}" stroke-width="3"' if stroke else ""
    return f'<text x="{x + by[0]:.1f}" y="{y + by[1]:.1f}" {style}>{escape(words)}</text>'
