"""Draw a roofline: how close each case comes to this machine's memory and arithmetic peaks.

    python benchmarks/roofline.py baselines/nvidia-h200/peaks.json DIR OUT.svg

DIR is the folder that `pytest --aisp-artifacts=DIR` writes. Each case whose work has FLOPs and
bytes is a column at its FLOP/byte. The baseline is a hollow point, and variants are filled points,
in FLOP/s of the declared work. All sides have the same declared bytes, so an optimization that
moves fewer bytes moves a point up, not to the right.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from pytest_aisp.results import run_reader
from pytest_aisp.results.row import duration, ratio
from pytest_aisp.timing.peaks import Peaks, load
from pytest_aisp.util import svg
from pytest_aisp.util.svg import GRAY, GRID, INK

WIDTH, HEIGHT = 1120, 600
LEFT, RIGHT, TOP, BOTTOM = 96, 970, 76, 540
COLUMNS, LINE, APART = 3, 15, 14
COLORS = {"fp32": "#0969da", "tf32": "#1a7f37", "bf16": "#bc4c00", "fp16": "#8250df"}
COLORS |= {"fp8": "#cf222e"}
ROOFS = ("fp32", "tf32", "bf16")
UNUSABLE = ("wrong", "invalid")


@dataclass
class Column:
    """One case. All its points have the same x, because all sides do the same declared work.

    Attributes:
        kind: the type that most of its FLOPs have.
        seconds: of a call by side, the baseline first; gains: ln(speedup) by variant.
    """

    name: str
    size: str
    kind: str
    flops: float
    intensity: float
    seconds: dict[str, float] = field(default_factory=dict)
    gains: dict[str, float] = field(default_factory=dict)

    @property
    def color(self) -> str:
        return COLORS.get(self.kind, GRAY)

    @property
    def rates(self) -> list[float]:
        """FLOP/s by side, the baseline first."""
        return [self.flops / seconds for seconds in self.seconds.values()]


def columns(rows: Iterable[Mapping[str, Any]]) -> list[Column]:
    """Return the cases that have FLOPs and bytes, in the order of intensity."""
    by_case: dict[tuple[str, str, str], Column] = {}
    for row in rows:
        work = row["work"]
        moved, flops = work["read"] + work["write"], sum(work["flops"].values())
        if moved and flops:
            name = row["function"].removeprefix("test_")
            size = ", ".join(f"{key}={value}" for key, value in row["size"].items())
            kind = max(work["flops"], key=lambda key: work["flops"][key])
            new = Column(name, size, kind, flops, flops / moved)
            column = by_case.setdefault((row["page"], name, size), new)
            column.seconds.update(row["seconds"])
            column.gains[row["variant"]] = row["value"]
    return sorted(by_case.values(), key=lambda column: column.intensity)


@dataclass(frozen=True)
class Window:
    """The ranges of the plot in FLOP/byte and FLOP/s, both logarithmic."""

    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, intensity: float, rate: float) -> tuple[float, float]:
        """Return the pixel of a point."""
        across, up = svg.log_fraction(intensity, *self.x), svg.log_fraction(rate, *self.y)
        return LEFT + across * (RIGHT - LEFT), BOTTOM - up * (BOTTOM - TOP)


def window_of(cases: Sequence[Column], copy: float, roofs: Sequence[tuple[str, float]]) -> Window:
    """Return a window that contains all points, all roofs and their ridges."""
    across = [*(c.intensity for c in cases), *(rate / copy for _, rate in roofs)]
    up = [*(rate for c in cases for rate in c.rates), *(rate for _, rate in roofs)]
    low, high = min(across) / 2, max(across) * 3
    return Window((low, high), (min(*up, low * copy * 2) / 2, max(up) * 2.5))


def roofs_of(cases: Sequence[Column], peaks: Peaks) -> list[tuple[str, float]]:
    """Return the arithmetic roofs by name, the lowest first."""
    kinds = [*ROOFS, *(c.kind for c in cases)]
    known = {kind: peaks.rates[kind] for kind in kinds if kind in peaks.rates}
    return sorted(known.items(), key=lambda roof: roof[1])


def draw(cases: Sequence[Column], peaks: Peaks, left_out: int) -> str:
    """Return the SVG: plot above, numbered list of the cases below."""
    copy, roofs = peaks.rates["copy"], roofs_of(cases, peaks)
    window = window_of(cases, copy, roofs)
    listed, end = _list(cases)
    height = end + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        *_title(peaks),
        *_grid(window),
        *_roofs(window, copy, roofs),
        *_points(window, cases),
        *listed,
        svg.text(36, height - 12, _footer(left_out), size=11, fill=GRAY),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _title(peaks: Peaks) -> Iterator[str]:
    facts = peaks.facts
    yield svg.text(
        LEFT, 32, f"Roofline of {facts.get('name', peaks.product)}", size=20, weight="bold"
    )
    known = [f"{key} {facts[key]}" for key in ("torch", "driver", "cuda") if key in facts]
    known += [facts["date"]] if "date" in facts else []
    text = "roofs as measured" + (f" ({', '.join(known)})" if known else "")
    yield svg.text(LEFT, 54, text, size=12, fill=GRAY)
    for x, radius, fill, label in ((790, 6, "#ffffff", "baseline"), (882, 3.8, INK, "optimized")):
        yield svg.circle(x, 28, radius, INK, fill)
        yield svg.text(x + 12, 32, label, size=12)


def _footer(left_out: int) -> str:
    text = (
        "FLOP/s and FLOP/byte of the work each page declares. What stays in a cache passes the DRAM"
    )
    text += " roof. Cases of one intensity stand abreast."
    return text + (f" Not shown, without FLOPs or bytes: {left_out}." if left_out else "")


def _grid(window: Window) -> Iterator[str]:
    for value in svg.decades(*window.x):
        x, _ = window.at(value, window.y[0])
        yield svg.line(x, TOP, x, BOTTOM, GRID)
        yield svg.text(x, BOTTOM + 18, f"{value:g}", anchor="middle", size=12)
    for value in svg.decades(*window.y):
        _, y = window.at(window.x[0], value)
        yield svg.line(LEFT, y, RIGHT, y, GRID)
        yield svg.text(LEFT - 8, y + 4, svg.si(value), anchor="end", size=12)
    yield f'<rect x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" height="{BOTTOM - TOP}" '
    yield f'fill="none" stroke="{GRAY}"/>'
    yield svg.text(
        (LEFT + RIGHT) / 2, BOTTOM + 40, "arithmetic intensity, FLOP/byte", anchor="middle"
    )
    yield svg.text(24, (TOP + BOTTOM) / 2, "FLOP/s", anchor="middle", turn=-90)


def _roofs(window: Window, copy: float, roofs: Sequence[tuple[str, float]]) -> Iterator[str]:
    highest = roofs[-1][1] if roofs else window.y[1]
    start = max(window.x[0], window.y[0] / copy)
    (x1, y1), (x2, y2) = window.at(start, start * copy), window.at(highest / copy, highest)
    turn = math.degrees(math.atan2(y2 - y1, x2 - x1))
    yield svg.line(x1, y1, x2, y2, INK, width=2)
    style: dict[str, Any] = {"size": 12, "weight": "bold"}
    yield svg.text(
        x2, y2, f"DRAM copy {svg.si(copy)}B/s", turn=turn, by=(-14, -7), anchor="end", **style
    )
    lines = [window.at(rate / copy, rate) for _, rate in roofs]
    labels = _spread([-y for _, y in lines], LINE)
    for (kind, rate), (x, y), label in zip(roofs, lines, labels, strict=True):
        color = COLORS.get(kind, GRAY)
        yield svg.line(x, y, RIGHT, y, color, width=2)
        yield svg.text(RIGHT + 8, 4 - label, f"{kind} {svg.si(rate)}FLOP/s", fill=color, **style)


def _points(window: Window, cases: Sequence[Column]) -> Iterator[str]:
    across = _spread([window.at(c.intensity, c.flops)[0] for c in cases], APART)
    heights = [[window.at(c.intensity, rate)[1] for rate in c.rates] for c in cases]
    taken = [(x, y, 7.0, 7.0) for x, ys in zip(across, heights, strict=True) for y in ys]
    for case, x, ys in zip(cases, across, heights, strict=True):
        yield svg.line(x, min(ys), x, max(ys), case.color)
        yield svg.circle(x, ys[0], 6, case.color, "#ffffff")
        yield from (svg.circle(x, y, 3.8, case.color, case.color) for y in ys[1:])
    for number, (case, x, ys) in enumerate(zip(cases, across, heights, strict=True), 1):
        half = 4.0 * len(str(number)) + 1
        u, v, far = _free((x, min(ys)), half, taken)
        taken.append((u, v, half, 7.0))
        if far:
            yield svg.line(x, min(ys), u, v, case.color, width=0.7)
        style: dict[str, Any] = {"anchor": "middle", "size": 12, "weight": "bold"}
        for stroke in ("#ffffff", ""):  # white behind the digits, where they cross a line
            yield svg.text(u, v + 4, str(number), fill=case.color, stroke=stroke, **style)


def _spread(places: Sequence[float], apart: float) -> list[float]:
    """Return ascending `places`, moved as little as possible so that they are `apart`."""
    groups: list[list[float]] = []
    for place in places:
        groups.append([place])
        while len(groups) > 1 and _ends(groups[-2], apart)[1] + apart > _ends(groups[-1], apart)[0]:
            last = groups.pop()
            groups[-1] += last
    return [_ends(group, apart)[0] + k * apart for group in groups for k in range(len(group))]


def _ends(group: Sequence[float], apart: float) -> tuple[float, float]:
    half = (len(group) - 1) / 2 * apart
    return fmean(group) - half, fmean(group) + half


def _free(
    at: tuple[float, float], half: float, taken: Sequence[tuple[float, float, float, float]]
) -> tuple[float, float, bool]:
    """Return the nearest place for a label `2 * half` wide, and whether it needs a line to `at`."""
    for ring in range(40):
        for turn in (-90, 0, 180, -45, -135, 45, 135, 90):
            x = at[0] + math.cos(math.radians(turn)) * (8 + half + 8 * ring)
            y = at[1] + math.sin(math.radians(turn)) * (15 + 8 * ring)
            inside = LEFT + half < x < RIGHT - half and TOP + 8 < y < BOTTOM - 8
            if inside and all(
                abs(x - u) >= half + w or abs(y - v) >= 7 + h for u, v, w, h in taken
            ):
                return x, y, ring > 0
    return at[0], at[1], False


def _list(cases: Sequence[Column]) -> tuple[list[str], int]:
    """Return the numbered list in columns, and where it ends."""
    blocks = [_entry(number, case) for number, case in enumerate(cases, 1)]
    room = sum(len(block) + 0.5 for block in blocks) / COLUMNS
    parts, column, row, most = [], 0, 0.0, 0.0
    for block in blocks:
        if row and row + len(block) / 2 > room and column < COLUMNS - 1:
            column, row = column + 1, 0.0
        for line, (indent, text) in enumerate(block):
            x, y = 36 + indent + column * (WIDTH - 50) / COLUMNS, HEIGHT + 24 + (row + line) * LINE
            style = f'font-size="11.5" fill="{INK}" xml:space="preserve"'
            parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {style}>{text}</text>')
        row += len(block) + 0.5
        most = max(most, row)
    return parts, int(HEIGHT + 24 + most * LINE)


def _entry(number: int, case: Column) -> list[tuple[int, str]]:
    """Return an entry's lines, each with its indent."""
    base, *variants = case.seconds
    head = f"{number}  {case.name}  "
    room = max(1, 48 - len(head))
    size = case.size if len(case.size) <= room else case.size[: room - 1] + "…"
    bold = f'<tspan font-weight="bold" fill="{case.color}">{escape(head)}</tspan>'
    texts = [f"{base} {duration(case.seconds[base])}"]
    texts += [f"{v} {duration(case.seconds[v])}, {ratio(case.gains[v])}" for v in variants]
    first = (0, f'{bold}<tspan fill="{GRAY}">{escape(size)}</tspan>')
    return [first, *((14, escape(text)) for text in texts)]


def main(arguments: Sequence[str]) -> None:
    """Read peaks and rows, write the SVG."""
    if len(arguments) != 3:
        sys.exit("usage: python benchmarks/roofline.py PEAKS.json DIR OUT.svg")
    peaks = load(Path(arguments[0]))
    try:
        rows = [line.to_json() for line in run_reader.load(arguments[1]).lines]
    except run_reader.RunError as error:
        sys.exit(str(error))
    timed = [row for row in rows if row["work"] and row["verdict"] not in UNUSABLE]
    mine = [row for row in timed if row["product"] == peaks.product]
    cases = columns(mine)
    if not cases or "copy" not in peaks.rates:
        products = ", ".join(sorted({row["product"] for row in timed})) or "no product"
        sys.exit(
            f"nothing to draw: of {len(mine)} timed cases of {peaks.product} none has FLOPs and"
            f" bytes; {arguments[1]} times {products}\ngive the peaks.json of a product it times"
        )
    left_out = len(mine) - sum(len(case.gains) for case in cases)
    Path(arguments[2]).write_text(draw(cases, peaks, left_out), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
