"""Arithmetic of a comparison: blocks to a process's value, processes to a spread.

Everything is in natural logarithms of ratios, so that faster and slower are symmetric and 0.01
reads as 1 %. `value` is always ln(speedup): positive when the optimized side is faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median

FLOOR = 0.0010
"""No spread is believed below 0.10 %: a smaller one is luck."""
ASSUMED = 4
"""Further sessions of one case that count as much as what is assumed of sessions."""

# 1 / sqrt(E[r^2]) for r^2 = mean square about the median without the largest of P normal values.
_TRIMMED_RMS = {3: 2.401, 4: 1.788, 5: 1.573, 6: 1.477, 7: 1.387, 8: 1.347, 9: 1.298, 10: 1.276}
_TRIMMED_RMS |= {11: 1.246, 12: 1.232, 14: 1.200, 16: 1.178, 20: 1.146, 24: 1.125}


def block_value(baseline: Sequence[float], optimized: Sequence[float]) -> float:
    """Return ln(speedup) of one block from the seconds per call of its windows."""
    return fmean(map(math.log, baseline)) - fmean(map(math.log, optimized))


def process_value(blocks: Sequence[float], firsts: Sequence[int] = (), *, robust: bool) -> float:
    """Return a process's value: the mean of the middle half of its blocks, or their median.

    A GPU now and then runs a few windows 10 % slower, once in half of the processes on one board
    (spread.md): no block may move the value by itself. The host's clock, `robust`, is worse.

    Args:
        firsts: by block, which side was built first. Where memory came to lie favours one of them
            by up to 1 %: blocks of either kind are taken together, and both means weigh the same.
    """
    if len(set(firsts)) > 1:
        kinds = ([b for b, f in zip(blocks, firsts, strict=True) if f == k] for k in (0, 1))
        return fmean(process_value(kind, robust=robust) for kind in kinds)
    if robust:
        return median(blocks)
    cut = len(blocks) // 4
    return fmean(sorted(blocks)[cut : len(blocks) - cut])


def process_error(blocks: Sequence[float], laps: int, firsts: Sequence[int] = ()) -> float:
    """Return the standard error of a process's value as its laps show it; 0 with fewer than three.

    As the value is a mean of the middle half of the blocks, a block outside of that half counts
    here as the half's nearest one: a few slow windows move neither the value nor its error. That
    is made for four laps; of eight, whole laps would fall outside, and the error be half too small.

    Args:
        blocks: of all laps, one after the other, as many of each.
        laps: how many.
        firsts: by block, which side was built first. What the order does cancels in the value:
            only laps of one order are compared with each other.
    """
    if laps < 3:
        return 0.0
    if len(blocks) % laps:
        raise ValueError(f"{len(blocks)} blocks are not {laps} laps of as many blocks each")
    each, firsts = len(blocks) // laps, firsts or [0] * len(blocks)
    rest, kinds = 0.0, sorted(set(firsts))
    for kind in kinds:
        mine = [blocks[i : i + each] for i in range(0, len(blocks), each) if firsts[i] == kind]
        inner = sorted(b for lap in mine for b in lap)
        cut = len(inner) // 4
        low, high = inner[cut], inner[-1 - cut]
        means = [fmean(min(max(block, low), high) for block in lap) for lap in mine]
        centre = fmean(means)
        rest += math.fsum((mean - centre) ** 2 for mean in means)
    return math.sqrt(rest / (laps - len(kinds)) / laps)


def trimmed_spread(values: Sequence[float]) -> float:
    """Return a standard deviation of `values` that one rogue process cannot inflate.

    Deviations from the median, the largest dropped, the rms of the rest scaled to be unbiased
    (in its square) for normal values. Needs at least 3 values.
    """
    if len(values) < 3:
        raise ValueError(f"a spread needs at least 3 processes, got {len(values)}")
    centre = median(values)
    kept = sorted(abs(v - centre) for v in values)[:-1]
    return _scale(len(values)) * math.sqrt(fmean(d * d for d in kept))


def _scale(count: int) -> float:
    known = min(_TRIMMED_RMS, key=lambda p: (abs(p - count), p))
    return _TRIMMED_RMS[known]


def rms(values: Iterable[float]) -> float:
    """Return the root mean square; 0 for no values."""
    squares = [v * v for v in values]
    return math.sqrt(fmean(squares)) if squares else 0.0


def pooled_spread(own: float, processes: int, others: Sequence[float]) -> float:
    """Shrink a case's `own` spread towards those of its product's `others`.

    The pool, their median, counts as 8 degrees of freedom, so that a case that was lucky in its
    few processes does not become the suite's false alarm. Never below `FLOOR`.
    """
    pool = median(others) if others else own  # one noisy case must not widen every other
    mine = max(processes - 2, 0)
    return max(FLOOR, math.sqrt((8 * pool**2 + mine * own**2) / (8 + mine)))


def session_spread(cases: Sequence[Sequence[Sequence[float]]], assumed: float) -> float:
    """Return the session-to-session sd that cases of several sessions show.

    Pooled is by how much a case's sessions differ beyond what its processes scatter by, which all
    its sessions of two processes and more tell; one of a single process counts as a session, too.
    A few cases that happen to agree narrow no margin: what is `assumed` counts as `ASSUMED` more.

    Args:
        cases: for each case, for each session, the values of its processes.
        assumed: the sd where nothing is known.
    """
    total, count = ASSUMED * assumed**2, ASSUMED
    for sessions in cases:
        within = [_variance(values) for values in sessions if len(values) >= 2]
        if len(sessions) >= 2 and within:
            means = [fmean(values) for values in sessions]
            centre = fmean(means)
            between = math.fsum((m - centre) ** 2 for m in means) / (len(means) - 1)
            own = fmean(within) * fmean(1 / len(values) for values in sessions)
            total += (len(means) - 1) * (between - own)
            count += len(means) - 1
    return math.sqrt(max(0.0, total / count))


def _variance(values: Sequence[float]) -> float:
    return trimmed_spread(values) ** 2 if len(values) >= 3 else (values[0] - values[1]) ** 2 / 2


def halves_ratio(blocks: Sequence[float]) -> float:
    """Return the drift inside a process: mean of the second half minus mean of the first."""
    middle = len(blocks) // 2
    return fmean(blocks[middle:]) - fmean(blocks[:middle]) if middle else 0.0
