"""Draw the stored results of pages that sweep a size: the time per call of each side.

    python benchmarks/curves.py suites/ch08 suites/ch09 [--check]

Each curve with at least three stored points is an SVG in the folder `curves` of the chapter. The
README of the chapter shows them between `<!-- curves -->` and `<!-- end of curves -->`. Points
whose sides have changed since are left out. `--check` writes nothing, and fails if a file differs.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from ladder import current

from pytest_aisp.page.pair import Case, Pair
from pytest_aisp.results import store
from pytest_aisp.results.row import duration
from pytest_aisp.util.svg import GRAY, GRID, circle, line, log_fraction, opening, si, text, ticks
from pytest_aisp.worker.loader import pair_of

ROOT = Path(__file__).parents[1]
START, END = "<!-- curves -->", "<!-- end of curves -->"
PRODUCTS = {
    "nvidia-h100-80gb-hbm3": "an H100",
    "nvidia-h200": "an H200",
    "nvidia-h200-x2": "two H200s",
    "nvidia-h200-x4": "four H200s",
}
WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 84, 580, 56, 360
COLORS = ("#59636e", "#0969da", "#1a7f37", "#bc4c00", "#8250df", "#cf222e", "#9a6700", "#1b7c83")
STEP = 17
"""The smallest vertical distance in pixels between the names of two curves."""
FEWEST = 3
"""The fewest points of a curve."""

Curves = Mapping[str, Mapping[float, float]]
"""Seconds per call, by side and by the value of the swept key."""
Others = tuple[tuple[str, Any], ...]
"""The keys of a size that are not swept, with their values."""


def pages(chapter: Path) -> Iterator[tuple[Path, str, Pair]]:
    """Yield each test of the chapter that sweeps a key, with its page."""
    for page in sorted(chapter.glob("*_test.py")):
        if "Sweep(" in page.read_text():
            module = importlib.import_module(f"suites.{chapter.name}.{page.stem}")
            for name, value in vars(module).items():
                pair = pair_of(value)
                if pair is not None and pair.sweep is not None:
                    yield page, name, pair


def stored_curves(
    page: Path, function: str, pair: Pair, product: str
) -> Iterator[tuple[Others, Curves]]:
    """Yield the curves of a test on `product`, one figure for each value of the other keys.

    A key that has another value at each point, as in ``rows = total // n``, does not count. Keys
    that are equal in all figures are left out.
    """
    file = ROOT / "baselines" / product / f"{page.parent.name}.json"
    known = store.load(file).results if file.exists() else {}
    timed = {key: result for key, result in known.items() if result.value is not None}
    results = current(page, function, pair, timed)
    cases = [case for case in pair.cases() if f"[{case.id}]" in results]
    assert pair.sweep is not None
    key, groups = pair.sweep.key, defaultdict(set)
    for case in cases:
        groups[_others(case, key)].add(case.size[key])
    alone = all(len(points) == 1 for points in groups.values())
    figures: dict[Others, dict[str, dict[float, list[float]]]] = {}
    for case in cases:
        result, group = results[f"[{case.id}]"], () if alone else _others(case, key)
        sides = figures.setdefault(group, defaultdict(lambda: defaultdict(list)))
        sides[pair.baseline.__name__][case.size[key]].append(result.baseline_us * 1e-6)
        sides[case.variant_name][case.size[key]].append(result.optimized_us * 1e-6)
    common = set.intersection(*map(set, figures)) if figures else set()
    for group, sides in figures.items():
        curves = {side: {x: median(t) for x, t in times.items()} for side, times in sides.items()}
        if long := {side: times for side, times in curves.items() if len(times) >= FEWEST}:
            yield tuple(item for item in group if item not in common), long


def _others(case: Case, key: str) -> Others:
    return tuple((name, value) for name, value in case.size.items() if name != key)


def draw(curves: Curves, title: str, key: str) -> str:
    """Return an SVG of the time per call over the swept key.

    The axes are logarithmic, but the axis of a key that can be 0 is linear.
    """
    xs = sorted({x for times in curves.values() for x in times})
    ys = [y for times in curves.values() for y in times.values()]
    up = min(ys) / 1.6, max(ys) * 1.6

    def across(x: float) -> float:
        if xs[0] <= 0:
            return LEFT + 20 + (x - xs[0]) / (xs[-1] - xs[0]) * (RIGHT - LEFT - 40)
        return LEFT + log_fraction(x, xs[0] / 1.15, xs[-1] * 1.15) * (RIGHT - LEFT)

    def above(y: float) -> float:
        return BOTTOM - log_fraction(y, *up) * (BOTTOM - TOP)

    parts = [*opening(WIDTH, HEIGHT), text(LEFT, 28, title, size=17, weight="bold")]
    last = float("-inf")
    for x in xs:
        at = across(x)
        parts.append(line(at, TOP, at, BOTTOM, GRID))
        if at - last > 42:
            last = at
            parts.append(text(at, BOTTOM + 18, _tick(x), anchor="middle", size=12))
    for y in ticks(*up):
        parts.append(line(LEFT, above(y), RIGHT, above(y), GRID))
        parts.append(text(LEFT - 8, above(y) + 4, duration(y), anchor="end", size=12))
    parts += [line(LEFT, BOTTOM, RIGHT, BOTTOM, GRAY), line(LEFT, TOP, LEFT, BOTTOM, GRAY)]
    parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 42, key, anchor="middle"))
    parts.append(text(LEFT, TOP - 8, "time per call", size=12, fill=GRAY))
    points = {
        side: [(across(x), above(y)) for x, y in sorted(times.items())]
        for side, times in curves.items()
    }
    label = float("-inf")
    for side in sorted(points, key=lambda side: points[side][-1][1]):
        color = COLORS[list(points).index(side) % len(COLORS)]
        for (x1, y1), (x2, y2) in itertools.pairwise(points[side]):
            parts.append(line(x1, y1, x2, y2, color, width=2))
        parts += [circle(x, y, 2.6, color, color) for x, y in points[side]]
        label = max(label + STEP, points[side][-1][1] + 4)
        parts.append(text(RIGHT + 10, label, side, fill=color, size=12, weight="bold"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _tick(value: float) -> str:
    """Return a value of the swept key: whole numbers up to 99999 in full, others shortened."""
    return f"{value:g}" if value < 100_000 else si(value).replace(" ", "")


def figures(chapter: Path) -> dict[str, tuple[str, str]]:
    """Return each figure's file name with its title and its SVG."""
    found = {}
    for page, function, pair in pages(chapter):
        assert pair.sweep is not None
        for product, words in PRODUCTS.items():
            for others, curves in stored_curves(page, function, pair, product):
                test = function.removeprefix("test_")
                title = ", ".join([f"{test} on {words}", *(f"{k}={v}" for k, v in others)])
                name = "-".join([test, product, *(f"{k}{v}" for k, v in others)]) + ".svg"
                found[name] = title, draw(curves, title, pair.sweep.key)
    return found


def main() -> int:
    """Write or check the figures of chapters and their lists in the READMEs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chapters", type=Path, nargs="+")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    wrong = []
    for chapter in (path.resolve() for path in options.chapters):
        drawn, readme = figures(chapter), chapter / "README.md"
        before, start, rest = readme.read_text().partition(START)
        _, end, after = rest.partition(END)
        if not start or not end:
            raise SystemExit(f"{readme} lacks the marks of the curves: {START} and {END}")
        shown = "\n".join(f"![{title}](curves/{name})" for name, (title, _) in drawn.items())
        texts = {readme: f"{before}{START}\n{shown}\n{END}{after}"}
        texts |= {chapter / "curves" / name: drawing for name, (_, drawing) in drawn.items()}
        old = {path for path in (chapter / "curves").glob("*.svg") if path not in texts}
        if options.check:
            differs = (p for p, t in texts.items() if not p.exists() or p.read_text() != t)
            wrong += [str(path) for path in (*differs, *old)]
            continue
        (chapter / "curves").mkdir(exist_ok=True)
        for path, content in texts.items():
            path.write_text(content)
        for path in old:
            path.unlink()
    if wrong:
        print(f"out of date: {', '.join(wrong)}; run python benchmarks/curves.py CHAPTERS")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
