"""Statistics: the ln(speedup) of a process from its blocks of samples, and standard deviations.

All values are natural logarithms of ratios. So faster and slower are symmetric, and 0.01 means
about 1 %. `value` is always ln(speedup), which is positive if the optimized side is faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median

FLOOR = 0.0010
"""The smallest standard deviation that is used, 0.10 %. Smaller estimates are due to chance."""
INTERVAL = 2.6
"""Half the width of the printed 99 % interval, as a multiple of the spread."""
ASSUMED = 4
"""The assumed spread between sessions counts as much as this many additional sessions."""

# Keys: the number of normally distributed values. Values: 1 / sqrt(E[r^2]), where r^2 is the mean
# square deviation from the median, without the largest deviation.
_TRIMMED_RMS = {3: 2.401, 4: 1.788, 5: 1.573, 6: 1.477, 7: 1.387, 8: 1.347, 9: 1.298, 10: 1.276}
_TRIMMED_RMS |= {11: 1.246, 12: 1.232, 14: 1.200, 16: 1.178, 20: 1.146, 24: 1.125}


def block_value(baseline: Sequence[float], optimized: Sequence[float]) -> float:
    """Return ln(speedup) of one block from the seconds per call of its windows."""
    return fmean(map(math.log, baseline)) - fmean(map(math.log, optimized))


def process_value(blocks: Sequence[float], firsts: Sequence[int] = (), *, robust: bool) -> float:
    """Return a process's value: the mean of the middle half of its blocks, or their median.

    A GPU sometimes runs a few timing windows 10 % slower. On one board, this happened in half of
    the processes (spread.md). So no single block may change the value much. Times on the host's
    clock are noisier and need the median (`robust`).

    Args:
        firsts: the index of the side that was built first, for each block. The order changes the
            memory layout, which favors one side by up to 1 %. So each order gets its own mean, and
            the two means have the same weight.
    """
    if len(set(firsts)) > 1:
        kinds = ([b for b, f in zip(blocks, firsts, strict=True) if f == k] for k in (0, 1))
        return fmean(process_value(kind, robust=robust) for kind in kinds)
    if robust:
        return median(blocks)
    cut = len(blocks) // 4
    return fmean(sorted(blocks)[cut : len(blocks) - cut])


def process_error(blocks: Sequence[float], laps: int, firsts: Sequence[int] = ()) -> float:
    """Return the standard error of a process's value from its laps, or 0 for fewer than three laps.

    The value is the mean of the middle half of the blocks. So this function replaces each block
    outside the middle half by the nearest block inside. Then a few slow windows change neither the
    value nor the error. This method is designed for four laps. With eight laps, whole laps would be
    outside the middle half, and the computed error would be only half of the true error.

    Args:
        blocks: the blocks of all laps in order. Each lap has the same number of blocks.
        laps: number of laps.
        firsts: the index of the side that was built first, for each block. The value averages out
            the effect of the order, so only laps of the same order are compared.
    """
    if laps < 3:
        return 0.0
    if len(blocks) % laps:
        raise ValueError(f"{len(blocks)} blocks cannot be divided into {laps} equal laps")
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
    """Return a standard deviation of `values` that a single outlier does not inflate.

    The result is the rms of the deviations from the median, without the largest deviation. The
    scale is chosen so that, for normally distributed values, the square is an unbiased estimate of
    the variance. At least 3 values are required.
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
    """Return the root mean square, or 0 for no values."""
    squares = [v * v for v in values]
    return math.sqrt(fmean(squares)) if squares else 0.0


def pooled_spread(own: float, processes: int, others: Sequence[float]) -> float:
    """Shrink a case's `own` spread toward the spreads of `others` on the same product.

    The median of `others` counts as much as 8 degrees of freedom. Without this median, a case whose
    few processes agree by chance would raise false alarms. The result is at least `FLOOR`.
    """
    pool = median(others) if others else own  # one noisy case would inflate the mean
    mine = max(processes - 2, 0)
    return max(FLOOR, math.sqrt((8 * pool**2 + mine * own**2) / (8 + mine)))


def session_spread(cases: Sequence[Sequence[Sequence[float]]], assumed: float) -> float:
    """Return the standard deviation between sessions, from the cases with several sessions.

    The variance between sessions includes some variance between processes, which is subtracted for
    each case. The result is pooled over all cases. A session with a single process adds only to
    the variance between sessions. `assumed` counts as much as `ASSUMED` additional sessions, so the
    margin stays wide if a few cases agree by chance.

    Args:
        cases: a list of sessions for each case. Each session is a list of its processes' values.
        assumed: the standard deviation to assume without any data.
    """
    total, count = 0.0, 0
    for sessions in cases:
        within = [_variance(values) for values in sessions if len(values) >= 2]
        if len(sessions) >= 2 and within:
            means = [fmean(values) for values in sessions]
            centre = fmean(means)
            between = math.fsum((m - centre) ** 2 for m in means) / (len(means) - 1)
            own = fmean(within) * fmean(1 / len(values) for values in sessions)
            total += (len(means) - 1) * (between - own)
            count += len(means) - 1
    # Noisy processes may make the total negative, which must not consume the assumed variance.
    return math.sqrt((ASSUMED * assumed**2 + max(0.0, total)) / (ASSUMED + count))


def case_session_spread(sessions: Sequence[Sequence[float]], pool: float) -> float:
    """Shrink the spread between one case's sessions toward `pool`, the spread of all cases.

    The spread differs from case to case: if the two sides' kernels are very different, the speedup
    varies more between boards. `pool` counts as much as `ASSUMED` sessions. The result has a lower
    bound that falls with the number of sessions, because a few sessions may agree by chance.

    Args:
        sessions: the values of each session's processes.
    """
    least = pool * math.sqrt(ASSUMED / (ASSUMED + max(0, len(sessions) - 1)))
    return max(least, session_spread([sessions], pool))


def _variance(values: Sequence[float]) -> float:
    return trimmed_spread(values) ** 2 if len(values) >= 3 else (values[0] - values[1]) ** 2 / 2


def interval(
    value: float, spread: float, processes: int = 1, *, session: float = 0.0, sessions: int = 1
) -> tuple[float, float]:
    """Return the 99 % interval of ln(speedup) to print, for a mean over `processes` processes.

    If `session` (the spread between sessions) is 0, the interval is valid only within one session.
    With a larger `session`, the interval covers other sessions too.
    """
    half = INTERVAL * math.hypot(spread / math.sqrt(processes), session / math.sqrt(sessions))
    return value - half, value + half
