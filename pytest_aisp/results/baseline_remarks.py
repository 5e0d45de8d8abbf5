"""Remarks about a baseline that may have been made slow: it waits, or hardly uses the machine.

A remark never changes the verdict. It asks a reader to look at the baseline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WAITS, FEWER_TIMES = 0.5, 2.0
"""A baseline waits if it computes for less than this share of its time, and for less than the other
side's share by this factor."""
UNUSED, USED = 0.01, 0.5
"""A baseline hardly uses the machine if it reaches less than the first share of a limit, of which
the other side reaches the second."""


def cpu_note(names: Sequence[str], shares: Sequence[float]) -> tuple[str, bool]:
    """Return the text about the CPU time of both sides, and whether the baseline waits.

    Args:
        names: the baseline and the variant.
        shares: by side, the CPU time of the process over the wall time of the timed calls.
    """
    baseline, optimized = shares
    if baseline < WAITS and FEWER_TIMES * baseline < optimized:
        return (
            f"{names[0]} computes for {baseline:.0%} of its time and waits for the rest, {names[1]}"
            f" computes for {min(optimized, 1.0):.0%}: look for a sleep, a lock, a file or another"
            " process",
            True,
        )
    return f"CPU time over wall time: {baseline:.2f} / {optimized:.2f}", False


def unused_limit(seconds: Mapping[str, float], share: float, limit: str) -> str | None:
    """Return the text about a baseline that hardly uses the machine, or None.

    Args:
        seconds: seconds per call by side, with the baseline first.
        share: the share of `limit` that the optimized side reaches.
    """
    (baseline, slow), (optimized, fast) = seconds.items()
    reached = share * fast / slow
    if reached >= UNUSED or share < USED:
        return None
    return (
        f"{baseline} reaches {reached:.2g} of the {limit} limit, {optimized} {share:.2g}: look for"
        " a wider type, a loop in Python or a sleep in the baseline"
    )
