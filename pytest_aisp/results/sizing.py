"""How many calls a window holds: as long on both sides, cold slots, fit to plant a slowdown.

All of it is arithmetic on what a call takes; `bench` measures that.
"""

from __future__ import annotations

import math

PLANTABLE = 0.85, 1.35
"""A window may hold this many times the wanted calls to plant a slowdown exactly."""
LONG, FEW_SLOTS = 5e-3, 2
"""Seconds of a call that need not go through all slots to find the L2 cold, and those that do for
it: bringing 60 MB of L2 from memory takes an H200 0.3 % of that."""


def calls_a_round(seconds_per_call: float, slots: int) -> int:
    """Return how many calls make a round: one a slot, or two slots' where a call is long."""
    return min(slots, FEW_SLOTS) if seconds_per_call >= LONG else slots


def calls_for(seconds_per_call: float, window: float, slots: int) -> int:
    """Return how many calls fill `window` seconds best: whole rounds, at least one.

    The nearest, so that both sides' windows last alike: what starting one costs is then the same.
    """
    calls = calls_a_round(seconds_per_call, slots)
    rounds = max(1, round(window / max(seconds_per_call * calls, 1e-9)))
    return min(rounds, 100_000) * calls


def extra_calls(counted: int, planted: float) -> int:
    """Return how many calls beside `counted` plant a slowdown of at least the share `planted`."""
    return math.ceil(counted * planted - 1e-9)


def calls_to_plant(calls: int, slots: int, planted: float) -> int:
    """Return how many calls, near `calls`, let whole extra calls plant `planted` most exactly.

    A multiple of `slots`; 100 calls plant 1 %, 101 would plant 2 %.
    """
    if not planted:
        return calls
    first = math.ceil(PLANTABLE[0] * calls / slots) * slots
    near = range(first, max(first, math.floor(PLANTABLE[1] * calls)) + 1, slots)
    return min(near, key=lambda n: (extra_calls(n, planted) / n, abs(n - calls)))
