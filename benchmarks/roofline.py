"""Draw a roofline: what each case reaches of what this machine's memory and arithmetic allow.

    python benchmarks/roofline.py baselines/nvidia-h200/peaks.json results.jsonl OUT.svg

`results.jsonl` is what `pytest --aisp-artifacts=DIR` writes. A case whose work has FLOPs and bytes is
a column at FLOP/byte: its baseline hollow, its variants filled, in FLOP/s of the declared work. So an
optimization that moves fewer bytes for the same work climbs; it does not wander to the right.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from pytest_aisp.peaks import Peaks, load
from pytest_aisp.row import duration

WIDTH, HEIGHT = 1120, 600
LEFT, RIGHT, TOP, BOTTOM = 96, 1096, 76, 540
COLUMNS, LINE = 3, 15
INK, GRAY, GRID = "#1f2328", "#59636e", "#e4e8ec"
COLORS = {"fp32": "#0969da", "tf32": "#1a7f37", "bf16": "#bc4c00", "fp16": "#8250df"}
COLORS |= {"fp8": "#cf222e", "other": "#59636e"}
ROOFS = ("fp32", "tf32", "bf16")
UNUSABLE = ("wrong", "invalid")
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


@dataclass
class Column:
    """One case: its variants stand above each other, since they do the same work.

    Attributes:
        kind: the type that most of its FLOPs have.
        seconds: of a call by side, the baseline first.
    """

    name: str
    size: str
    kind: str
    flops: float
    intensity: float
    seconds: dict[str, float]

    def rate(self, side: str) -> float:
        """Return FLOP/s of `side`."""
        return self.flops / self.seconds[side]

    @property
    def sides(self) -> list[str]:
        return list(self.seconds)


def columns(rows: Iterable[dict[str, Any]], product: str) -> list[Column]:
    """Return the timed cases of `product` that have FLOPs and bytes, in the order of intensity."""
    found: dict[tuple[str, str, str], Column] = {}
    for row in rows:
        if row["product"] != product or row["verdict"] in UNUSABLE or not row["timings"]:
            continue
        work = row["timings"][0]["work"]
        moved, flops = work["read"] + work["write"], sum(work["flops"].values())
        if moved and flops:
            name = row["function"].removeprefix("test_")
            size = ", ".join(f"{k}={v}" for k, v in row["size"].items())
            kind = max(work["flops"], key=lambda key: work["flops"][key])
            column = Column(name, size, kind, flops, flops / moved, {})
            column = found.setdefault((row["page"], name, size), column)
            column.seconds.update(row["seconds"])
    return sorted(found.values(), key=lambda column: column.intensity)


@dataclass(frozen=True)
class Axes:
    """The window of the plot, in FLOP/byte and FLOP/s, both logarithmic."""

    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, intensity: float, rate: float) -> tuple[float, float]:
        """Return the pixel of a point."""
        across, up = _part(intensity, *self.x), _part(rate, *self.y)
        return LEFT + across * (RIGHT - LEFT), BOTTOM - up * (BOTTOM - TOP)


def _part(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low)


def axes(cases: Sequence[Column], peaks: Peaks) -> Axes:
    """Return a window that holds every point, every roof and its ridge."""
    copy, roofs = peaks.rates["copy"], [rate for _, rate in _roofs(cases, peaks)]
    across = [c.intensity for c in cases] + [rate / copy for rate in roofs]
    up = [c.rate(side) for c in cases for side in c.sides] + roofs
    low, high = min(across) / 2, max(across) * 4
    return Axes((low, high), (min(*up, low * copy * 2) / 2, max(up) * 2.5))


def _roofs(cases: Sequence[Column], peaks: Peaks) -> list[tuple[str, float]]:
    kinds = [*ROOFS, *(c.kind for c in cases)]
    known = {kind: peaks.rates[kind] for kind in kinds if kind in peaks.rates}
    return sorted(known.items(), key=lambda roof: roof[1])


def draw(cases: Sequence[Column], peaks: Peaks, left_out: int) -> str:
    """Return the SVG: plot above, numbered list of the cases below."""
    window = axes(cases, peaks)
    listed, bottom = _list(cases)
    height = bottom + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        *_title(peaks),
        *_grid(window),
        *_lines(window, cases, peaks),
        *_points(window, cases),
        *listed,
        _text(LEFT, height - 12, _footer(left_out), size=11, fill=GRAY),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _title(peaks: Peaks) -> Iterator[str]:
    facts = peaks.facts
    yield _text(LEFT, 32, f"Roofline of {facts.get('name', peaks.product)}", size=20, weight="bold")
    known = [f"{key} {facts[key]}" for key in ("torch", "driver", "cuda", "date") if key in facts]
    text = "roofs measured here" + (f" ({', '.join(known)})" if known else "")
    yield _text(LEFT, 54, text, size=12, fill=GRAY)
    for x, fill, label in ((880, "#ffffff", "baseline"), (970, INK, "optimized")):
        yield _circle(x, 28, 5, INK, fill)
        yield _text(x + 11, 32, label, size=12)


def _footer(left_out: int) -> str:
    text = "FLOP/s and FLOP/byte of the work each page declares; time from the run's results.jsonl."
    more = "cases have" if left_out > 1 else "case has"
    return text + (f" {left_out} timed {more} no FLOPs or no bytes." if left_out else "")


def _grid(window: Axes) -> Iterator[str]:
    for value in _ticks(*window.x):
        x, _ = window.at(value, window.y[0])
        yield _line(x, TOP, x, BOTTOM, GRID)
        yield _text(x, BOTTOM + 18, f"{value:g}", anchor="middle", size=12)
    for value in _ticks(*window.y):
        _, y = window.at(window.x[0], value)
        yield _line(LEFT, y, RIGHT, y, GRID)
        yield _text(LEFT - 8, y + 4, _si(value), anchor="end", size=12)
    yield f'<rect x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" height="{BOTTOM - TOP}" '
    yield f'fill="none" stroke="{GRAY}"/>'
    middle = (TOP + BOTTOM) / 2
    yield _text((LEFT + RIGHT) / 2, BOTTOM + 40, "arithmetic intensity, FLOP/byte", anchor="middle")
    yield _text(24, middle, "FLOP/s", anchor="middle", turn=-90)


def _ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [10.0**d for d in decades if low <= 10.0**d <= high]


def _lines(window: Axes, cases: Sequence[Column], peaks: Peaks) -> Iterator[str]:
    copy, roofs = peaks.rates["copy"], _roofs(cases, peaks)
    highest = max((rate for _, rate in roofs), default=window.y[1])
    start = max(window.x[0], window.y[0] / copy)
    (x1, y1), (x2, y2) = window.at(start, start * copy), window.at(highest / copy, highest)
    yield _line(x1, y1, x2, y2, INK, width=2)
    turn = math.degrees(math.atan2(y2 - y1, x2 - x1))
    x, y = x1 + 0.1 * (x2 - x1), y1 + 0.1 * (y2 - y1)
    yield _text(x, y, f"DRAM copy {_si(copy)}B/s", turn=turn, lift=7, size=12, weight="bold")
    above = math.inf
    for kind, rate in roofs:
        (x, y), color = window.at(rate / copy, rate), COLORS.get(kind, COLORS["other"])
        yield _line(x, y, RIGHT, y, color, width=2)
        above = min(y - 6, above - LINE)  # two rates that are close: the label of one is lifted
        label = f"{kind} {_si(rate)}FLOP/s"
        yield _text(RIGHT - 6, above, label, anchor="end", size=12, weight="bold", fill=color)


def _points(window: Axes, cases: Sequence[Column]) -> Iterator[str]:
    placed = [[window.at(c.intensity, c.rate(side)) for side in c.sides] for c in cases]
    taken = [(x, y, 7.0, 7.0) for points in placed for x, y in points]
    for case, points in zip(cases, placed, strict=True):
        color = COLORS.get(case.kind, COLORS["other"])
        heights = [y for _, y in points]
        yield _line(points[0][0], min(heights), points[0][0], max(heights), color)
        for (x, y), fill in zip(points, ["#ffffff", *[color] * len(points)], strict=False):
            yield _circle(x, y, 5, color, fill)
    for number, (case, points) in enumerate(zip(cases, placed, strict=True), 1):
        color = COLORS.get(case.kind, COLORS["other"])
        at, text = min(points, key=lambda p: p[1]), str(number)
        x, y, far = _free(at, 4.0 * len(text) + 2, taken)
        taken.append((x, y, 4.0 * len(text) + 2, 7.0))
        if far:
            yield _line(*at, x, y, color, width=0.7)
        yield _text(x, y + 4, text, anchor="middle", size=12, weight="bold", fill=color, halo=True)


def _free(
    at: tuple[float, float], half: float, taken: Sequence[tuple[float, float, float, float]]
) -> tuple[float, float, bool]:
    """Return the nearest place for a label `2 * half` wide, and whether it needs a line to `at`."""
    for ring in range(40):
        for turn in (0, 180, -45, -135, 45, 135, -90, 90):
            x = at[0] + math.cos(math.radians(turn)) * (12 + half + 8 * ring)
            y = at[1] + math.sin(math.radians(turn)) * (17 + 8 * ring)
            inside = LEFT + half < x < RIGHT - half and TOP + 8 < y < BOTTOM - 8
            if inside and not any(
                abs(x - u) < half + w and abs(y - v) < 7 + h for u, v, w, h in taken
            ):
                return x, y, ring > 0
    return at[0], at[1], False


def _list(cases: Sequence[Column]) -> tuple[list[str], int]:
    """Return the numbered list in columns, and where it ends."""
    blocks = [_entry(number, case) for number, case in enumerate(cases, 1)]
    room = -(-sum(len(block) + 0.5 for block in blocks) // COLUMNS)
    parts, column, row, most = [], 0, 0.0, 0.0
    for block in blocks:
        if row and row + len(block) > room + 1 and column < COLUMNS - 1:
            column, row = column + 1, 0.0
        x = LEFT - 60 + column * (WIDTH - 50) / COLUMNS
        for text in block:
            parts.append(text.format(x=f"{x:.1f}", y=f"{HEIGHT + 24 + row * LINE:.1f}"))
            row += 1
        row += 0.5
        most = max(most, row)
    return parts, int(HEIGHT + 24 + most * LINE)


def _entry(number: int, case: Column) -> list[str]:
    """Return an entry's lines, each with its place left open."""
    color, (base, *variants) = COLORS.get(case.kind, COLORS["other"]), case.sides
    head = f"{number}  {case.name}  "
    size = _short(case.size, 50 - len(head))
    lines = [
        f'<tspan font-weight="bold" fill="{color}">{_plain(head)}</tspan>'
        f'<tspan fill="{GRAY}">{_plain(size)}</tspan>'
    ]
    lines.append(_plain(f"{base} {duration(case.seconds[base])}"))
    for side in variants:
        gain = case.seconds[base] / case.seconds[side]
        lines.append(_plain(f"{side} {duration(case.seconds[side])}, {gain:.3g}x"))
    indents = (0, *[14] * len(lines))
    return [
        f'<text x="{{x}}" y="{{y}}" dx="{dx}" font-size="11.5" fill="{INK}" '
        f'xml:space="preserve">{line}</text>'
        for dx, line in zip(indents, lines, strict=False)
    ]


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: max(0, most - 1)] + "…"


def _plain(text: str) -> str:
    return escape(text).replace("{", "{{").replace("}", "}}")


def _si(value: float) -> str:
    scale, prefix = next(((s, p) for s, p in PREFIXES if value >= s), (1.0, ""))
    return f"{value / scale:.3g} {prefix}"


def _line(x1: float, y1: float, x2: float, y2: float, color: str, *, width: float = 1) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{color}" stroke-width="{width}"/>'


def _circle(x: float, y: float, radius: float, color: str, fill: str) -> str:
    place = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius}"'
    return f'<circle {place} stroke="{color}" stroke-width="1.8" fill="{fill}"/>'


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: float = 13,
    anchor: str = "start",
    weight: str = "normal",
    fill: str = INK,
    turn: float = 0,
    lift: float = 0,
    halo: bool = False,
) -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}"'
    style += f' transform="rotate({turn:.2f} {x:.1f} {y:.1f})"' if turn else ""
    style += ' stroke="#ffffff" stroke-width="3" paint-order="stroke"' if halo else ""
    return f'<text x="{x:.1f}" y="{y - lift:.1f}" {style}>{escape(text)}</text>'


def main(arguments: Sequence[str]) -> None:
    """Read peaks and rows, write the SVG."""
    if len(arguments) != 3:
        sys.exit("usage: python benchmarks/roofline.py PEAKS.json RESULTS.jsonl OUT.svg")
    peaks = load(arguments[0])
    rows = [json.loads(line) for line in Path(arguments[1]).read_text().splitlines() if line]
    mine = [row for row in rows if row["product"] == peaks.product and row["timings"]]
    cases = columns(mine, peaks.product)
    if not cases or "copy" not in peaks.rates:
        products = (
            ", ".join(sorted({row["product"] for row in rows if row["timings"]})) or "nothing"
        )
        sys.exit(
            f"nothing to draw: {arguments[1]} has {len(mine)} timed cases of {peaks.product}, none"
            f" with FLOPs and bytes (it times {products})\ngive the peaks.json of that product"
        )
    usable = [row for row in mine if row["verdict"] not in UNUSABLE]
    shown = sum(len(case.sides) - 1 for case in cases)
    Path(arguments[2]).write_text(draw(cases, peaks, len(usable) - shown), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
