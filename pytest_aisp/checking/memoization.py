"""Detect sides that keep answers, and so are fast only on values that they have seen before.

Windows repeat their values, so a side that keeps answers looks fast. Only Python code can look up
an answer, and no Python runs while a graph is replayed. On the other clocks, each side is timed in
two ways: on values that differ from those of the previous call, and on values that were shown
several times in a row.

An honest side can be faster on repeated values as well, because branch predictors, caches and TLBs
have seen these values. So a side that was faster is also timed on altered values, which have the
same order, signs and equal elements. The hardware treats altered values like the old ones, but
a side has no answer to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ..isolation.monkeypatches import now
from ..page.pair import SideError
from ..util import pytree
from ..util.process_group import current_group
from .inputs import BoundSide, InputPool
from .page_values import Inputs, make_inputs

if TYPE_CHECKING:
    import torch

ROUNDS = 3
"""Number of sets of new values on which every side is timed."""
REPEATS, REPEATING_SECONDS = 16, 0.3
"""A side is shown the values that it should know this often, or for at most this many seconds.

A side may keep only answers that are asked for often.
"""
ALTERED_ROUNDS, BATCHES = 12, 4
"""Number of rounds with altered values before a decision, and of attempts to reach one."""
REPEAT_RATIO = 1.5
"""A side remembers answers if it takes longer by this factor on values that it has not seen."""
REPEAT_SECONDS = 20e-6
"""A side is refused only if it also takes longer by this many seconds."""
LOWERED = 64
"""One in this many altered integers is lowered by 1."""


def check_repeats(
    pool: InputPool, sides: Sequence[BoundSide], wait: Callable[[], None], seed: int
) -> None:
    """Refuse a side that is fast only on values that it has seen before.

    This runs the sides on slot 0, and changes the values in it.

    Raises:
        SideError: if a side remembers answers. The message has both times.
    """
    timers = [_SideTimer(pool, side, wait) for side in sides]
    new: list[list[float]] = [[] for _ in sides]
    again: list[list[float]] = [[] for _ in sides]
    for number in range(seed, seed + ROUNDS):
        values = _draw(pool, number)
        for i, timer in enumerate(timers):
            new[i].append(timer.seconds(values, after=pool.value_set(0)))
            again[i].append(timer.repeated(values))
    for timer, unseen, seen in zip(timers, new, again, strict=True):
        if _longer(min(unseen), min(seen)):
            _check_altered(timer, seed + ROUNDS)


def _draw(pool: InputPool, seed: int) -> Inputs:
    return make_inputs(pool.pair, pool.device, pool.size, seed)


def _longer(unseen: float, seen: float) -> bool:
    return unseen > REPEAT_RATIO * seen and unseen - seen > REPEAT_SECONDS


def _check_altered(timer: _SideTimer, seed: int) -> None:
    """Refuse a side whose fastest call on altered values takes longer than its repeated calls.

    Another process can only make a call slower. If it slows the repeated calls, there are more
    rounds. If even those allow no decision, the side is not refused.
    """
    unseen: list[float] = []
    seen: list[float] = []
    for number in range(seed, seed + BATCHES * ALTERED_ROUNDS):
        values = _draw(timer.pool, number)
        altered = _altered(values)
        if altered is None:
            return
        timer.seconds(values, after=timer.pool.value_set(0))
        seen.append(timer.repeated(values))
        try:
            unseen.append(timer.seconds(altered, after=values))
        except Exception:  # the page's values meet a condition that altered ones do not meet
            return
        if not _longer(min(unseen), min(seen)):
            return
        if len(seen) % ALTERED_ROUNDS == 0 and _longer(min(unseen), median(seen)):
            raise SideError(
                f"{timer.side.name} takes {median(seen):.3g} s on values that it has seen before,"
                f" and at least {min(unseen):.3g} s if they are altered slightly: it remembers"
                " answers instead of computing them"
            )


@dataclass
class _SideTimer:
    """Times single calls of one side on slot 0. The fastest so far took `fastest` seconds."""

    pool: InputPool
    side: BoundSide
    wait: Callable[[], None]
    fastest: float = math.inf

    def seconds(self, values: Inputs, after: Inputs) -> float:
        """Return the time of a call on `values` that follows a call on the values `after`.

        The same writes and the same call come before each timed call, so that calls differ only
        in whether the side has seen `values`.
        """
        slot = self.pool.slots[0]
        pytree.copy_into(slot, after)
        self.side.run(0)
        pytree.copy_into(slot, values)
        self.side.restore()
        self.wait()
        start = now()
        self.side.run(0)
        self.wait()
        seconds = current_group().max(now() - start)
        self.fastest = max(min(self.fastest, seconds), 1e-9)
        return seconds

    def repeated(self, values: Inputs) -> float:
        """Return the time of a call on values that were shown often, also in the call before.

        The slot contains `values` already.
        """
        for _ in range(max(1, min(REPEATS, int(REPEATING_SECONDS / self.fastest)))):
            self.side.restore()
            self.side.run(0)
        return self.seconds(values, after=values)


def _altered(values: Inputs) -> Inputs | None:
    """Return slightly different values, or None if `values` have nothing that can be altered.

    All floats are halved. This is exact, and it keeps what a side may rely on, such as a sorted
    table or a symmetric matrix. Other indices would read other memory, so integers change only if
    there are no floats. Then a few of the largest ones are lowered, which keeps their range.
    """
    import torch

    tensors = [tensor for _, tensor in pytree.tensors(values)]
    floating = any(t.is_floating_point() or t.is_complex() for t in tensors)
    with torch.no_grad():
        altered = pytree.map_tensors(_halved if floating else _lowered, values)
    after = (tensor for _, tensor in pytree.tensors(altered))
    same = all(torch.equal(old, new) for old, new in zip(tensors, after, strict=True))
    return None if same else altered


def _halved(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return 0.5 * tensor
    if not tensor.is_floating_point():
        return tensor
    wide = tensor.float() if tensor.dtype.itemsize < 4 else tensor  # no arithmetic in 8 bits
    return (0.5 * wide).to(tensor.dtype)


def _lowered(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.long().flatten()
    if not len(wide):
        return tensor
    few = 1 + len(wide) // LOWERED
    largest = wide >= wide.kthvalue(1 + len(wide) - few).values
    lowered = largest & (wide > wide.min()) & (largest.cumsum(0) <= few)
    return (wide - lowered.long()).to(tensor.dtype).view(tensor.shape)
