"""Draw distributions of latencies: each side's share of requests or gaps that took at most a time.

The band of a side holds 95 % of the distributions that a bootstrap over replays gives. Requests of
one replay wait for each other, so the bootstrap draws whole replays.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

from pytest_aisp.results.row import duration
from pytest_aisp.util.svg import GRID, INK, line, log_fraction, opening, text, ticks

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 60, 600, 56, 360
COLORS = ("#59636e", "#0969da", "#bc4c00", "#1a7f37")
SHARES = [percent / 100 for percent in range(1, 100)]
DRAWN = 400
"""Bootstrap draws."""

Band = tuple[list[float], list[float], list[float]]
"""Seconds at each of `SHARES`: measured, and the two ends of the 95 % band."""


def band_of(replays: Sequence[Sequence[float]]) -> Band:
    """Return the distribution of the seconds of all replays, and its band."""
    rng = random.Random(0)
    drawn = [_distribution(rng.choices(replays, k=len(replays))) for _ in range(DRAWN)]
    ends = [sorted(times) for times in zip(*drawn, strict=True)]
    low, high = ([times[int(share * DRAWN)] for times in ends] for share in (0.025, 0.975))
    return _distribution(replays), low, high


def _distribution(replays: Sequence[Sequence[float]]) -> list[float]:
    ordered = sorted(itertools.chain.from_iterable(replays))
    return [ordered[int(share * len(ordered))] for share in SHARES]


def draw(sides: Mapping[str, Sequence[Sequence[float]]], title: str, objective: float) -> str:
    """Return an SVG with a curve and a band for each side, and a line at the objective."""
    found = {side: band_of(replays) for side, replays in sides.items()}
    every = [objective, *(x for band in found.values() for times in band for x in times)]
    along = max(min(every), 1e-9) / 1.2, max(every) * 1.2

    def across(seconds: float) -> float:
        return LEFT + log_fraction(max(seconds, along[0]), *along) * (RIGHT - LEFT)

    def above(share: float) -> float:
        return BOTTOM - share * (BOTTOM - TOP)

    parts = [*opening(WIDTH, HEIGHT), text(LEFT, 28, title, size=17, weight="bold")]
    for x in ticks(*along):
        parts.append(line(across(x), TOP, across(x), BOTTOM, GRID))
        parts.append(text(across(x), BOTTOM + 18, duration(x), anchor="middle", size=12))
    for share in (0.0, 0.25, 0.5, 0.75, 0.99):
        parts.append(line(LEFT, above(share), RIGHT, above(share), GRID))
        parts.append(text(LEFT - 8, above(share) + 4, f"{share:.0%}", anchor="end", size=12))
    parts.append(line(across(objective), TOP, across(objective), BOTTOM, INK, dash="5 4"))
    parts.append(text(across(objective), TOP - 6, "objective", anchor="middle", size=12))
    for number, (side, (middle, low, high)) in enumerate(found.items()):
        color = COLORS[number % len(COLORS)]
        edge = [*zip(low, SHARES, strict=True), *reversed([*zip(high, SHARES, strict=True)])]
        corners = " ".join(f"{across(x):.1f},{above(y):.1f}" for x, y in edge)
        curve = " ".join(
            f"{across(x):.1f},{above(y):.1f}" for x, y in zip(middle, SHARES, strict=True)
        )
        parts.append(f'<polygon points="{corners}" fill="{color}" opacity="0.2"/>')
        parts.append(f'<polyline points="{curve}" stroke="{color}" stroke-width="2" fill="none"/>')
        label = TOP + 14 + 18 * number
        parts.append(text(RIGHT + 12, label, side, fill=color, size=12, weight="bold"))
    return "\n".join([*parts, "</svg>"]) + "\n"
