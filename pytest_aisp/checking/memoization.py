"""Detect memoization: sides that cache answers and are fast only on values seen before.

Timing windows repeat their values, so a side that caches answers looks fast. Only Python code can
look up an answer, and no Python code runs while a CUDA graph is replayed. If the clock times Python
calls, each side is timed in two ways: on values that differ from the previous call's values, and on
values that the side got several times in a row.

A side that caches no answers can also be faster on repeated values, because of branch predictors,
CPU caches and TLBs. So a side that was faster on repeated values is timed again on altered values.
The altered values have the same order, signs and equal elements as the old values, so the hardware
treats both alike. But the side cannot have cached answers for the altered values.

The work of a side may depend on its values: a cascade calls a large model for inputs that a small
model is not sure of. On altered values, repeated calls are then slower or faster too. A side whose
work depends on its values is judged on values that are altered less, so that the work stays the
same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
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
"""A function that changes the values of a floating-point tensor, and returns any other as it is."""
ROUNDS = 3
"""Number of sets of new values on which every side is timed."""
REPEATS, REPEATING_SECONDS = 16, 0.3
"""Repeated values are passed to a side this many times, for at most this many seconds.

One call is not enough, because a side may cache only answers to frequent inputs.
"""
ALTERED_ROUNDS, BATCHES = 12, 4
"""Number of rounds with altered values before each attempt to decide, and number of attempts."""
REPEAT_RATIO = 1.5
"""A side caches answers if new values make it slower by this factor."""
REPEAT_SECONDS = 20e-6
"""A side is refused only if new values also make it slower by this many seconds."""
WORK_CHANGES = "the work of the side depends on its values"
LOWERED = 64
"""When integers are altered, 1 out of this many integers is lowered by 1."""


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
    """Refuse a side that is slow in the first call on altered values and fast in later calls.

    Integers may be lengths. Altered lengths change the shapes inside the side, and the first call
    with new shapes may be slow (cuDNN builds a plan for each shape). So if all inputs are integers,
    the tensors are also altered one at a time. A side that caches answers has to look at every
    tensor that its outputs depend on. If a side stays fast when one of these tensors is altered, it
    caches no answers.

    Raises:
        SideError: if the side is refused. The message has both times.
    """
    accusation = _slow_once(timer, seed, _Change(_halved))
    if accusation == WORK_CHANGES:
        accusation = _slow_once(timer, seed, _Change(_largest_rounded))
    if accusation in (None, WORK_CHANGES):
        return
    for only in _integers_alone(timer, seed):
        seed += BATCHES * ALTERED_ROUNDS  # values that the side has not seen yet
        if _slow_once(timer, seed, only) is None:
            return
    raise SideError(accusation)


def _integers_alone(timer: _SideTimer, seed: int) -> list[_Change]:
    """Return one change per tensor that the outputs depend on, or none if any tensor has floats."""
    values = _draw(timer.pool, seed)
    tensors = _tensors(values)
    if any(t.is_floating_point() or t.is_complex() for t in tensors):
        return []
    changes = [_Change(_lowered, only) for only in range(len(tensors))]
    return [change for change in changes if timer.outputs_change(values, change.of(values))]


def _slow_once(timer: _SideTimer, seed: int, change: _Change) -> str | None:
    """Return a message if a side is slow only in the first call on altered values.

    Other processes can slow some calls down. If the repeated calls were slow, the times are
    inconclusive, and more rounds follow. If all rounds are inconclusive, the result is None.

    Returns:
        `WORK_CHANGES` if a side is slow on altered values because its work depends on the values.
    """
    unseen: list[float] = []
    seen: list[float] = []
    again: list[float] = []  # repeated calls on altered values
    for number in range(seed, seed + BATCHES * ALTERED_ROUNDS):
        values = _draw(timer.pool, number)
        altered = change.of(values)
        if altered is None:
            return None
        timer.seconds(values, after=timer.pool.value_set(0))
        seen.append(timer.repeated(values))
        try:
            unseen.append(timer.seconds(altered, after=values))
            again.append(timer.repeated(altered))
        except Exception:  # altered values may violate a precondition of the side
            return None
        if not _longer(min(unseen), min(seen)):
            return None
        if len(seen) % ALTERED_ROUNDS == 0 and _longer(min(unseen), median(seen)):
            if _longer(min(again), min(seen)) or _longer(min(seen), min(again)):
                return WORK_CHANGES
            return (
                f"{timer.side.name} takes {median(seen):.3g} s on values that it has seen before,"
                f" and at least {min(unseen):.3g} s if they are altered slightly: it remembers"
                " answers instead of computing them"
            )
    return None


@dataclass
class _SideTimer:
    """Times single calls of one side on slot 0.

    Attributes:
        fastest: seconds of the fastest call.
    """

    pool: InputPool
    side: BoundSide
    wait: Callable[[], None]
    fastest: float = math.inf

    def seconds(self, values: Inputs, after: Inputs) -> float:
        """Return the seconds that a call on `values` takes right after a call on `after`.

        The same writes and the same untimed call precede each timed call. The only difference
        between timed calls is whether the side has seen `values`.
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

    def outputs_change(self, values: Inputs, altered: Inputs | None) -> bool:
        """Return whether the outputs for `altered` differ from those for `values` on any rank."""
        if altered is None:
            return False
        outputs = []
        for new in (values, altered):
            pytree.copy_into(self.pool.slots[0], new)
            self.side.restore()
            outputs.append(dict(pytree.leaves(pytree.clone(self.side.run(0)))))
        return current_group().max(not pytree.equal_values(*outputs)) > 0

    def repeated(self, values: Inputs) -> float:
        """Return the seconds that a call on `values` takes after many calls on the same values.

        The slot must contain `values` already.
        """
        for _ in range(max(1, min(REPEATS, int(REPEATING_SECONDS / self.fastest)))):
            self.side.restore()
            self.side.run(0)
        return self.seconds(values, after=values)


def _tensors(values: Inputs) -> list[torch.Tensor]:
    """Return the tensors in the order in which `map_tensors` visits them."""
    tensors: list[torch.Tensor] = []

    def visit(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    pytree.map_tensors(visit, values)
    return tensors


@dataclass(frozen=True)
class _Change:
    """A way to alter values slightly.

    Attributes:
        alter: a function that returns a floating-point tensor with other values, and any other
            tensor unchanged.
        only: the number of the only tensor that is altered, or None for all tensors.
    """

    alter: Alter
    only: int | None = None

    def of(self, values: Inputs) -> Inputs | None:
        """Return slightly different values, or None if nothing in `values` can be altered.

        An integer may be an index, and another index would read other memory. So integers change
        only if there are no floats: a few of the largest integers are lowered, which keeps all of
        them in range.

        Args:
            values: the arguments that the page's `inputs` returned.
        """
        import torch

        tensors = _tensors(values)
        floating = any(t.is_floating_point() or t.is_complex() for t in tensors)
        alter, numbers = (self.alter if floating else _lowered), count()

        def altered_or_not(tensor: torch.Tensor) -> torch.Tensor:
            return alter(tensor) if next(numbers) == self.only or self.only is None else tensor

        with torch.no_grad():
            altered = pytree.map_tensors(altered_or_not, values)
        same = all(map(torch.equal, tensors, _tensors(altered)))
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
