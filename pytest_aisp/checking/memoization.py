"""Detect sides that cache answers by input value, and so are fast only on repeated values.

Windows repeat their values, so a side with a memo looks fast. Only Python code can use a memo, and
Python does not run during windows of the graph and queue clocks. On the other clocks, each side is
timed on new values, and then on the same values again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..isolation.monkeypatches import now
from ..page.pair import SideError
from ..util import pytree
from ..util.process_group import current_group
from .inputs import BoundSide, InputPool, make_inputs

ROUNDS, MORE_ROUNDS = 3, 12
"""Number of sets of new values, and number of additional sets before a side is refused."""
REPEAT_RATIO = 1.5
"""A side remembers answers if its best time on new values is longer by this factor."""
REPEAT_SECONDS = 20e-6
"""A side is refused only if new values are also slower by at least this many seconds."""

Times = tuple[list[float], list[float]]
"""Times in seconds on new values, and on the same values again."""


def check_repeats(
    pool: InputPool, sides: Sequence[BoundSide], wait: Callable[[], None], seed: int
) -> None:
    """Refuse a side that is fast only on values that it has seen before.

    This runs the sides on slot 0, and changes the values in it.

    Raises:
        SideError: if a side remembers answers. The message has both times.
    """
    times: list[Times] = [([], []) for _ in sides]
    _time_repeats(pool, sides, times, wait, range(seed, seed + ROUNDS))
    if any(_remembers(*pair) for pair in times):
        more = range(seed + ROUNDS, seed + ROUNDS + MORE_ROUNDS)
        _time_repeats(pool, sides, times, wait, more)
    for side, (new, again) in zip(sides, times, strict=True):
        if _remembers(new, again):
            raise SideError(
                f"{side.name} takes {min(new):.3g} s on new values and {min(again):.3g} s when they"
                " come again: it remembers answers instead of computing them"
            )


def _remembers(new: Sequence[float], again: Sequence[float]) -> bool:
    difference = min(new) - min(again)
    return min(new) > REPEAT_RATIO * min(again) and difference > REPEAT_SECONDS


def _time_repeats(
    pool: InputPool,
    sides: Sequence[BoundSide],
    times: Sequence[Times],
    wait: Callable[[], None],
    seeds: Sequence[int],
) -> None:
    for seed in seeds:
        values = make_inputs(pool.pair, pool.device, pool.size, seed)
        for side, pair in zip(sides, times, strict=True):
            for seconds in pair:
                # The same copy and the same call on other values come before both timings, so that
                # they differ only in whether the values are new.
                for shown in (values, pool.value_set(0)):
                    pytree.copy_into(pool.slots[0], shown)
                side.run(0)
                pytree.copy_into(pool.slots[0], values)
                side.restore()
                wait()
                start = now()
                side.run(0)
                wait()
                seconds.append(current_group().max(now() - start))
