"""Change points of a series of ln(speedup): the runs at which its level changed.

Binary segmentation proposes candidates. Then the weakest candidate is removed until all remaining
candidates are significant. The noise is estimated again after each removal. The estimate includes
autocorrelation, so a slow wave counts as noise and not as a series of changes. Values are clipped
at `CLIP` standard deviations, so a single spike is not a change. docs/explanation/history.md has
the error rates.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist, median
from typing import NamedTuple

from .stats import ASSUMED, INTERVAL

FLOOR = 0.01
"""A change is reported only if the far end of its interval is at least this large (1 %)."""
LEAST, LEAST_BETWEEN = 2, 3
"""The minimum number of points between a change and an end of the series, and between two changes.
The second number is larger, so that two spikes in a row do not look like two changes.
"""
CLIP = 3.6
"""A value farther from the median than this many standard deviations is clipped to that distance.
"""
CANDIDATE = 3.5
"""Two levels that are this many standard errors of white noise apart are a candidate."""
FOUND = 4.8
"""Two levels that are this many standard errors apart are a change. The threshold is large because
every position is tried.
"""
KNOWN = 0.001
"""The probability of a false change at any of the positions where an environment fact changed."""
MOVED = 12.0
"""A change moves away from a known position only if chi-square falls by more than this."""
SHORTEST = 8
"""The minimum number of values in each part of a stretch that is searched separately."""
SHORT = 1e9
"""Subtracted from the strength of a change with too few points, which is then removed first."""


@dataclass(frozen=True)
class ChangePoint:
    """A change in the level.

    Attributes:
        at: index of the first value at the new level.
        old: the old level, in ln(speedup).
        size: the new level minus the old one, in ln(speedup).
        error: standard error of `size`.
    """

    at: int
    old: float
    size: float
    error: float

    @property
    def interval(self) -> tuple[float, float]:
        """The 99 % interval of `size`."""
        return self.size - INTERVAL * self.error, self.size + INTERVAL * self.error


class _Stretch(NamedTuple):
    """Sums over a stretch, which is the values between two successive changes.

    Attributes:
        length, weight: the number of values, and the sum of their weights.
        level: the weighted mean of the clipped values.
        squares: the sum of the squared distances to the level, each in standard deviations.
        products: the sum of the products of successive distances.
    """

    length: int
    weight: float
    level: float
    squares: float
    products: float


class _Noise(NamedTuple):
    """The noise around the levels.

    Attributes:
        scale: standard deviation of the noise, as a multiple of the assumed standard deviation.
        phi: correlation of a value with the next one, from 0 to 0.95.
    """

    scale: float
    phi: float

    def error(self, left: _Stretch, right: _Stretch) -> float:
        """Return the standard error of the difference between two levels."""
        variances = (_inflation(each.length, self.phi) / each.weight for each in (left, right))
        return self.scale * math.sqrt(math.fsum(variances))


def change_points(
    values: Sequence[float],
    errors: Sequence[float],
    *,
    session: float = 0.0,
    known: Collection[int] = (),
) -> list[ChangePoint]:
    """Return the changes in the level, the earliest first.

    Args:
        values: ln(speedup) of each run, the oldest first.
        errors: the standard error of each value, above 0.
        session: the expected standard deviation between sessions. This prior counts as much as four
            runs.
        known: the indices of runs before which something changed, such as the driver. A change at
            such an index needs less evidence.
    """
    end = len(values)
    if end < 2 * LEAST:
        return []
    series = _Series(values, _scales(values, errors, session))
    known = {at for at in known if 0 < at < end}
    splits = sorted(known)
    for start, stop in _stretches(splits, end):
        splits += series.candidates(start, stop)
    kept = series.moved(series.pruned(sorted(splits), known), known)
    return [series.change(at, kept) for at in kept]


def _scales(values: Sequence[float], errors: Sequence[float], session: float) -> list[float]:
    """Return each value's standard deviation, from its error and the scatter between runs.

    The scatter comes from the differences of successive values. Changes of the level and spikes
    hardly affect these differences.
    """
    steps = [abs(b - a) for a, b in pairwise(values)]
    seen = median(steps) / NormalDist().inv_cdf(0.75) / math.sqrt(2)
    excess = max(0.0, seen**2 - median(e * e for e in errors))
    count = len(values)
    between = (ASSUMED * session**2 + count * excess) / (ASSUMED + count)
    return [math.sqrt(error**2 + between) for error in errors]


def _stretches(splits: Sequence[int], end: int) -> Iterator[tuple[int, int]]:
    return zip([0, *splits], [*splits, end], strict=True)


@dataclass(frozen=True)
class _Series:
    """The values with their standard deviations. `_seen` caches stretches by start and end."""

    values: Sequence[float]
    scales: Sequence[float]
    _seen: dict[tuple[int, int], _Stretch] = field(default_factory=dict)
    _gaps: dict[tuple[int, int, int], float] = field(default_factory=dict)

    def candidates(self, start: int, stop: int) -> list[int]:
        """Return the indices at which the level of the stretch may change.

        This is seeded binary segmentation: parts of the stretch are searched too, because two
        opposite changes can cancel out over the whole stretch.
        """
        clipped = self._clipped(start, stop)
        best, where = CANDIDATE, None
        for low, high in _parts(stop - start):
            first, last = self._least(start + low), self._least(start + high)
            distance, at = _best_split(clipped[low:high], first, last)
            if distance > best:
                best, where = distance, start + low + at
        if where is None:
            return []
        return [*self.candidates(start, where), where, *self.candidates(where, stop)]

    def pruned(self, splits: Sequence[int], known: Collection[int]) -> list[int]:
        """Remove the weakest of `splits` until all remaining splits are significant."""
        kept = list(splits)
        limit = max(NormalDist().inv_cdf(1 - KNOWN / 2 / max(len(known), 1)), CANDIDATE)
        while kept:
            noise = self._noise(kept)
            strengths = [
                self._strength(at, *around, noise) / (limit if at in known else FOUND)
                for at, around in zip(kept, self._around(kept), strict=True)
            ]
            weakest = min(strengths)
            if weakest >= 1:
                break
            del kept[strengths.index(weakest)]
        return kept

    def moved(self, splits: Sequence[int], known: Collection[int]) -> list[int]:
        """Return `splits`, each moved to the index at which its two levels fit best.

        A change at a known index moves only if another index fits much better.
        """
        noise, kept = self._noise(splits), list(splits)
        unit = noise.scale**2 * (1 + noise.phi) / (1 - noise.phi)
        for index, at in enumerate(splits):
            start, stop = self._around(kept)[index]
            clipped = self._clipped(start, stop)
            best, where = _best_split(clipped, self._least(start), self._least(stop))
            here, _ = _best_split(clipped, at - start, stop - at)
            if (best**2 - here**2) / unit > (MOVED if at in known else 0.0):
                kept[index] = start + where
        return kept

    def change(self, at: int, splits: Sequence[int]) -> ChangePoint:
        """Return the change at `at`, which is one of `splits`."""
        start, stop = self._around(splits)[splits.index(at)]
        left, right = self._stretch(start, at), self._stretch(at, stop)
        error = self._noise(splits).error(left, right)
        return ChangePoint(at, left.level, right.level - left.level, error)

    def _around(self, splits: Sequence[int]) -> list[tuple[int, int]]:
        """Return, for each split, the start of the stretch before it and the end of the next."""
        return list(zip([0, *splits[:-1]], [*splits[1:], len(self.values)], strict=True))

    def _least(self, end: int) -> int:
        """Return the minimum number of points between a change and `end`."""
        return LEAST if end in (0, len(self.values)) else LEAST_BETWEEN

    def _clipped(self, start: int, stop: int) -> list[tuple[float, float]]:
        """Return (weight, weight times clipped value) for each value of a stretch.

        The clipped values are relative to the median of the stretch.
        """
        values, scales = self.values[start:stop], self.scales[start:stop]
        centre, found = median(values), []
        for value, scale in zip(values, scales, strict=True):
            weight, most = scale**-2, CLIP * scale
            found.append((weight, weight * min(max(value - centre, -most), most)))
        return found

    def _strength(self, at: int, start: int, stop: int, noise: _Noise) -> float:
        """Return the distance between the levels before and after `at`, in standard errors.

        The result is 0 for a change that is too small to be reported, and negative for a change
        with too few values before or after.
        """
        key = start, at, stop
        if key not in self._gaps:
            clipped = self._clipped(start, stop)
            self._gaps[key] = abs(_mean(clipped[at - start :]) - _mean(clipped[: at - start]))
        left, right = self._stretch(start, at), self._stretch(at, stop)
        error = noise.error(left, right)
        if left.length < self._least(start) or right.length < self._least(stop):
            return self._gaps[key] / error - SHORT
        certain = abs(right.level - left.level) + INTERVAL * error
        return self._gaps[key] / error if certain >= FLOOR else 0.0

    def _noise(self, splits: Sequence[int]) -> _Noise:
        """Estimate the noise from how far the values are from their levels between `splits`."""
        count = len(self.values)
        stretches = [self._stretch(*ends) for ends in _stretches(splits, count)]
        squares = math.fsum(each.squares for each in stretches)
        phi = math.fsum(each.products for each in stretches) / squares if squares else 0.0
        # The levels follow slow waves, so this estimate of phi is too low. Each additional level
        # makes the estimate even lower.
        phi = min(max(phi + (1 + 3 * phi) * len(stretches) / count, 0.0), 0.95)
        free = max(count - sum(_inflation(each.length, phi) for each in stretches), 0.0)
        return _Noise(math.sqrt(max(1.0, (ASSUMED + squares) / (ASSUMED + free))), phi)

    def _stretch(self, start: int, stop: int) -> _Stretch:
        key = start, stop
        if key not in self._seen:
            clipped = self._clipped(start, stop)
            level, weight = _mean(clipped), math.fsum(w for w, _ in clipped)
            rest = [(v / w - level) * math.sqrt(w) for w, v in clipped]
            self._seen[key] = _Stretch(
                length=stop - start,
                weight=weight,
                level=median(self.values[start:stop]) + level,
                squares=math.fsum(r * r for r in rest),
                products=math.fsum(a * b for a, b in pairwise(rest)),
            )
        return self._seen[key]


def _parts(count: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the whole stretch, then of parts of half, a quarter, ... its length.

    Each part overlaps the next one by half.
    """
    length = count
    while True:
        starts = [*range(0, count - length, max(1, length // 2)), count - length]
        yield from ((start, start + length) for start in starts)
        length = -(-length // 2)
        if length < SHORTEST:
            return


def _best_split(clipped: Sequence[tuple[float, float]], first: int, last: int) -> tuple[float, int]:
    """Return the largest distance between two levels, in standard errors, and its index.

    Args:
        first, last: the minimum numbers of values before the index, and from the index on.
    """
    total_weight, total = math.fsum(w for w, _ in clipped), math.fsum(v for _, v in clipped)
    weight = moment = best = 0.0
    where = 0
    for at, (w, v) in enumerate(clipped[: max(len(clipped) - last, 0)], start=1):
        weight += w
        moment += v
        if at >= first:
            gap = moment / weight - (total - moment) / (total_weight - weight)
            distance = gap * gap * weight * (total_weight - weight)
            if distance > best:
                best, where = distance, at
    return math.sqrt(best / total_weight) if total_weight else 0.0, where


def _mean(clipped: Sequence[tuple[float, float]]) -> float:
    return math.fsum(v for _, v in clipped) / math.fsum(w for w, _ in clipped)


def _inflation(count: int, phi: float) -> float:
    """Return the factor by which the correlation `phi` raises the variance of a mean."""
    # The result is 1 + 2 * sum((1 - lag / count) * phi**lag for lag in range(1, count)).
    return (1 + phi) / (1 - phi) - 2 * phi * (1 - phi**count) / (count * (1 - phi) ** 2)
