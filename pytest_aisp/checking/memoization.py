"""Detect memoization: sides that cache answers, and so are fast only on values seen before.

Timing windows repeat their values, so a side that caches answers looks fast. Only Python code can
look up an answer, and no Python code runs while a CUDA graph is replayed. On clocks that time calls
of Python code, each side is timed in two ways: on values that differ from the previous call's
values, and on values that the side got several times in a row.

A side that caches no answers can also be faster on repeated values, because of branch predictors,
CPU caches and TLBs. So a side that was faster on repeated values is timed again on altered values.
The altered values have the same order, signs and equal elements as the old values, so the hardware
treats both alike. But the side cannot have cached answers for the altered values.

The work of a side may depend on its values: a cascade calls its large model for the inputs that its
small model is not sure of. Then the altered values make repeated calls slower or faster, too. Such
a side is judged on values that are altered less, so that its work stays the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

from ..isolation.monkeypatches import now
from ..page.pair import SideError
from ..util import pytree
from ..util.process_group import current_group
from .inputs import BoundSide, InputPool
from .page_values import Inputs, make_inputs

if TYPE_CHECKING:
    import torch

Alter: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"
"""Returns a floating-point tensor with other values, and other tensors as they are."""
ROUNDS = 3
"""Number of sets of new values on which every side is timed."""
REPEATS, REPEATING_SECONDS = 16, 0.3
"""Repeated values are passed to a side this many times, or for at most this many seconds.

One call is not enough, because a side may cache only answers to frequent inputs.
"""
ALTERED_ROUNDS, BATCHES = 12, 4
"""Number of rounds with altered values before each attempt to decide, and number of attempts."""
REPEAT_RATIO = 1.5
"""A side caches answers if it takes longer by this factor on values that it has not seen."""
REPEAT_SECONDS = 20e-6
"""A side is refused only if it also takes longer by this many seconds."""
LOWERED = 64
"""When integers are altered, one out of this many is lowered by 1."""


def check_repeats(
    pool: InputPool, sides: Sequence[BoundSide], wait: Callable[[], None], seed: int
) -> None:
    """Refuse a side that is fast only on values that it has seen before.

    The sides run on slot 0, and the values in slot 0 change.

    Raises:
        SideError: if a side caches answers. The message has both times.
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
    """Refuse a side that is slow in its first call on altered values, and then fast."""
    if _work_changes(timer, seed, _halved):
        _work_changes(timer, seed, _largest_rounded)


def _work_changes(timer: _SideTimer, seed: int, alter: Alter) -> bool:
    """Return True if a side is slow on altered values because its work depends on the values.

    Other processes can slow some calls. If the repeated calls were slow, the times allow no
    decision, and more rounds follow. If there is still no decision, the side is not refused.

    Raises:
        SideError: the side is slow only in its first call on altered values.
    """
    unseen: list[float] = []
    seen: list[float] = []
    again: list[float] = []  # repeated calls on altered values
    for number in range(seed, seed + BATCHES * ALTERED_ROUNDS):
        values = _draw(timer.pool, number)
        altered = _altered(values, alter)
        if altered is None:
            return False
        timer.seconds(values, after=timer.pool.value_set(0))
        seen.append(timer.repeated(values))
        try:
            unseen.append(timer.seconds(altered, after=values))
            again.append(timer.repeated(altered))
        except Exception:  # altered values may violate a precondition of the side
            return False
        if not _longer(min(unseen), min(seen)):
            return False
        if len(seen) % ALTERED_ROUNDS == 0 and _longer(min(unseen), median(seen)):
            if _longer(min(again), min(seen)) or _longer(min(seen), min(again)):
                return True
            raise SideError(
                f"{timer.side.name} takes {median(seen):.3g} s on values that it has seen before,"
                f" and at least {min(unseen):.3g} s if they are altered slightly: it remembers"
                " answers instead of computing them"
            )
    return False


@dataclass
class _SideTimer:
    """Times single calls of one side on slot 0.

    Attributes:
        fastest: seconds of the fastest call so far.
    """

    pool: InputPool
    side: BoundSide
    wait: Callable[[], None]
    fastest: float = math.inf

    def seconds(self, values: Inputs, after: Inputs) -> float:
        """Return how many seconds a call on `values` takes right after a call on `after`.

        The same writes and the same untimed call precede each timed call. So timed calls differ
        only in whether the side has seen `values`.
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
        """Return how many seconds a call on `values` takes after many calls on the same values.

        The slot must contain `values` already.
        """
        for _ in range(max(1, min(REPEATS, int(REPEATING_SECONDS / self.fastest)))):
            self.side.restore()
            self.side.run(0)
        return self.seconds(values, after=values)


def _altered(values: Inputs, alter: Alter) -> Inputs | None:
    """Return slightly different values, or None if nothing in `values` can be altered.

    Integers may be indices, and other indices would read other memory. So integers change only if
    there are no floats: a few of the largest integers are lowered, which keeps all of them in
    range.

    Args:
        values: the arguments that the page's `inputs` returned.
        alter: returns a floating-point tensor with other values, and other tensors as they are.
    """
    import torch

    tensors = [tensor for _, tensor in pytree.tensors(values)]
    floating = any(t.is_floating_point() or t.is_complex() for t in tensors)
    with torch.no_grad():
        altered = pytree.map_tensors(alter if floating else _lowered, values)
    after = (tensor for _, tensor in pytree.tensors(altered))
    same = all(torch.equal(old, new) for old, new in zip(tensors, after, strict=True))
    return None if same else altered


def _halved(tensor: torch.Tensor) -> torch.Tensor:
    """Halve the elements of `tensor`, unless they are integers.

    Even a side that compares only some elements, or compares them roughly, notices the change.
    Halving is exact, and it preserves properties that a side may rely on, such as a sorted table
    or a symmetric matrix.
    """
    if tensor.is_complex():
        return 0.5 * tensor
    if not tensor.is_floating_point():
        return tensor
    wide = tensor.float() if tensor.dtype.itemsize < 4 else tensor  # no arithmetic in 8 bits
    return (0.5 * wide).to(tensor.dtype)


def _largest_rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Move the floats of the largest magnitude to the next representable number toward zero.

    Even if the work of a side depends on its values, this move almost never changes the work.
    """
    import torch

    if tensor.is_complex():
        return torch.view_as_complex(_largest_rounded(torch.view_as_real(tensor)))
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    magnitude = tensor.double().abs()
    largest = (magnitude == magnitude.max()) & (magnitude > 0)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.contiguous().view(integers[tensor.dtype.itemsize])
    return (bits - largest.to(bits.dtype)).view(tensor.dtype)  # toward zero, whatever the sign


def _lowered(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.long().flatten()
    if not len(wide):
        return tensor
    few = 1 + len(wide) // LOWERED
    largest = wide >= wide.kthvalue(1 + len(wide) - few).values
    lowered = largest & (wide > wide.min()) & (largest.cumsum(0) <= few)
    return (wide - lowered.long()).to(tensor.dtype).view(tensor.shape)
