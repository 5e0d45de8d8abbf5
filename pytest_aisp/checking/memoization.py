"""Answers remembered by value: right on every input, and fast only on those that come again.

Windows repeat their values, so a memo looks like a fast side. Only Python can keep one: on the
graph and queue clocks it does not run, on the others each side is timed on values that nobody has
seen, and then on the same ones again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..isolation.monkeypatches import now
from ..page.pair import SideError
from ..util import pytree
from ..util.process_group import current_group
from .inputs import BoundSide, InputPool, make_inputs

ROUNDS, MORE_ROUNDS = 3, 12
"""Sets of new values, and how many more are drawn before a side is accused."""
MUCH = 1.5
"""A side remembers that takes this many times longer for new values, at its best, than again."""
LEAST = 20e-6
"""Seconds by which it must be slower: less is not worth remembering."""


def check_repeats(
    bench: InputPool, subjects: Sequence[BoundSide], wait: Callable[[], None], seed: int
) -> None:
    """Refuse a subject that is fast only on values which it has seen.

    Runs the subjects on slot 0 and leaves other values there.

    Raises:
        SideError: with both times.
    """
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in subjects]
    _time(bench, subjects, times, wait, range(seed, seed + ROUNDS))
    if any(_remembers(*pair) for pair in times):
        _time(bench, subjects, times, wait, range(seed + ROUNDS, seed + ROUNDS + MORE_ROUNDS))
    for subject, (new, again) in zip(subjects, times, strict=True):
        if _remembers(new, again):
            raise SideError(
                f"{subject.name} takes {min(new):.3g} s on new values and {min(again):.3g} s when"
                " they come again: it remembers answers, which is not what is compared"
            )


def _remembers(new: Sequence[float], again: Sequence[float]) -> bool:
    return min(new) > MUCH * min(again) and min(new) - min(again) > LEAST


def _time(
    bench: InputPool,
    subjects: Sequence[BoundSide],
    times: Sequence[tuple[list[float], list[float]]],
    wait: Callable[[], None],
    seeds: Sequence[int],
) -> None:
    for seed in seeds:
        values = make_inputs(bench.pair, bench.device, bench.size, seed)
        for subject, pair in zip(subjects, times, strict=True):
            for which in pair:
                # A copy of these values and a call on others come before both: caches and sleeping
                # threads are alike, and nothing differs but whether these values are new.
                for shown in (values, bench.value_set(0)):
                    pytree.copy_into(bench.slots[0], shown)
                subject.run(0)
                pytree.copy_into(bench.slots[0], values)
                subject.restore()
                wait()
                start = now()
                subject.run(0)
                wait()
                which.append(current_group().max(now() - start))
