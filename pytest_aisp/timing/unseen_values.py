"""Give every call timed on the CPU's clock new input values, and keep some calls for checking.

A window of the CPU's clock runs each call on its own slot. Immediately before the window, another
process draws values from a secret seed, and this process writes them to the slots of the window. No
code of a side runs between this draw and the start of the clock. So no answer can be computed in
advance or remembered. Before the draw, one untimed call runs on earlier values, so that the
allocator already has memory pages for the outputs.

After the window, randomly chosen calls are kept, with their inputs and outputs.
"""

from __future__ import annotations

import functools
import random
import time
from dataclasses import dataclass
from typing import Protocol

from ..checking.compare import check_outputs, check_unchanged
from ..checking.inputs import BoundSide, InputPool
from ..checking.numerics import NamedTensors
from ..checking.page_values import Inputs, scaled_down
from ..checking.reference import outputs_and_state
from ..isolation.protections import enabled
from ..page.pair import size_words
from ..util import pytree
from ..util.process_group import current_group
from .schedule import calls_to_plant, extra_calls

LARGEST_SET = 4 << 20
"""Bytes of the largest value set that is drawn again. Larger value sets are repeated in windows.

The limit is in bytes and not in seconds, so that every run measures the same thing. A call on newly
written values may take several times as long as a call on cached values.
"""
MOST_SLOTS = 128
"""The maximum number of slots, and therefore of calls in a window."""
SLOT_BYTES = 64 << 20
"""The maximum number of bytes of all slots and their outputs."""
DRAW_SECONDS, MOST_DRAW_SECONDS = 0.01, 0.1
"""The maximum seconds to draw the values of one window, for long and for short calls."""
SLOWEST_DRAW = 0.5
"""If one value set takes longer to draw, windows repeat their values."""
SHORT_WINDOW = 1e-3
"""If drawing values is slow, all calls of a window together take this many seconds."""
SEVERAL = 32
"""Number of value sets that are drawn together to measure the time per set."""
KEPT_CALLS, KEPT_BYTES, KEPT_OF_WINDOW = 512, 128 << 20, 32
"""The maximum number of kept calls per side, total bytes, and kept calls per window."""


class ValueSource(Protocol):
    """Something that draws value sets."""

    def draw(self, count: int, like: Inputs) -> list[Inputs]:
        """Return `count` new value sets with the types and shapes of `like`."""


@dataclass(frozen=True)
class TimedCall:
    """Copies of the inputs and outputs of a timed call."""

    values: Inputs
    outputs: NamedTensors


class UnseenValues:
    """Writes new values to the slots of `pool`, and keeps randomly chosen timed calls.

    Attributes:
        draw_seconds: time to draw one value set.
        kept: the kept calls of each side.
    """

    def __init__(self, pool: InputPool, source: ValueSource) -> None:
        self.pool, self._source = pool, source
        self._random = random.SystemRandom()
        self.draw_seconds = 0.0
        self._drawn: list[Inputs] = []
        self._calls: dict[BoundSide, int] = {}
        self.kept: dict[BoundSide, list[TimedCall]] = {}

    def slot_count(self, output_bytes: int, planted: float) -> int:
        """Return the number of slots, or 0 if drawing takes too long. This draws values."""
        like = self.pool.value_set(0)
        self._source.draw(1, like)  # the first one imports the page
        seconds = self._seconds_to_draw(like, 1)
        if seconds > SLOWEST_DRAW:
            return 0
        if seconds < DRAW_SECONDS:  # such a short time may be mostly the cost of the round trip
            seconds = self._seconds_to_draw(like, SEVERAL)
        self.draw_seconds = seconds
        fit = SLOT_BYTES // max(1, pytree.nbytes(like) + output_bytes)
        least = 2 if planted else 1  # a slowdown is planted with a second call
        return max(least, min(MOST_SLOTS, fit, int(MOST_DRAW_SECONDS / seconds)))

    def _seconds_to_draw(self, like: Inputs, count: int) -> float:
        """Return the shortest time to draw `count` value sets, per value set."""
        times = []
        for _ in range(2):
            start = time.perf_counter()
            self._source.draw(count, like)
            times.append(time.perf_counter() - start)
        return min(times) / count

    def draw(self, calls: int) -> None:
        """Draw new values for the first `calls` slots."""
        self._drawn = self._source.draw(calls, self.pool.slots[0])
        if self.pool.scaled:
            self._drawn = [self._scaled(values) for values in self._drawn]

    def write(self, side: BoundSide) -> None:
        """Write the drawn values to the slots, and NaN to the side's earlier outputs."""
        for slot, values in zip(self.pool.slots, self._drawn, strict=False):
            pytree.copy_into(slot, values)
        if enabled("poisoned-outputs"):
            pytree.poison(side.outputs)

    def _scaled(self, values: Inputs) -> Inputs:
        return pytree.map_tensors(functools.partial(scaled_down, self._random.randrange(3)), values)

    def keep(self, side: BoundSide) -> None:
        """Keep some calls of the last window. Each window has the same chance.

        Raises:
            SideError: if a kept call changed its inputs, or returned outputs that are not plain.
        """
        kept, most = self.kept.setdefault(side, []), self._most_kept(side)
        size = size_words(self.pool.size)
        count = min(len(self._drawn), KEPT_OF_WINDOW)
        for number in self._random.sample(range(len(self._drawn)), count):
            seen = self._calls[side] = self._calls.get(side, 0) + 1
            if self._random.randrange(seen) >= most:
                continue
            values, outputs = self._drawn[number], side.outputs[number]
            check_unchanged(side.name, self.pool.slots[number], values, size)
            check_outputs(side.name, outputs, self.pool.slots[number : number + 1], size)
            if len(kept) == most:
                kept.pop(self._random.randrange(most))
            named = [(path, t.clone()) for path, t in outputs_and_state(outputs, None)]
            kept.append(TimedCall(pytree.clone(values), named))
        self._drawn = []  # they are as large as the slots

    def _most_kept(self, side: BoundSide) -> int:
        nbytes = pytree.nbytes(self.pool.slots[0]) + pytree.nbytes(side.outputs[0])
        return max(1, min(KEPT_CALLS, KEPT_BYTES // max(1, 2 * nbytes)))

    def calls(self, side: BoundSide) -> list[TimedCall]:
        """Return and remove the kept calls of a side, in random order."""
        kept = self.kept.pop(side, [])
        self._calls.pop(side, None)
        return self._random.sample(kept, len(kept))


def supports(pool: InputPool) -> bool:
    """Return whether every timed call of this case can get new values.

    A state makes a call depend on earlier calls, and a prepared side may keep data about a slot.
    Tensors must be plain, because their bytes are copied, and not too large.
    """
    import torch

    tensors = [tensor for _, tensor in pytree.tensors(pool.value_set(0))]
    plain = all(type(t) is torch.Tensor and t.layout == torch.strided for t in tensors)
    alone = current_group().world == 1 and pool.pair.state is None and not pool.prepared
    return alone and plain and 0 < pytree.nbytes(pool.value_set(0)) <= LARGEST_SET


def window_calls(
    seconds: float, window: float, slots: int, draw_seconds: float, planted: float
) -> int:
    """Return the number of counted calls in a window.

    The counted and extra calls together use at most `slots` slots. If possible, there are at least
    two calls, because two calls reveal a shared output buffer.

    Args:
        seconds: time of a call.
        window: time that the calls should take.
    """
    wanted = max(2, round(window / max(seconds, 1e-9)))
    drawn = int(DRAW_SECONDS / max(draw_seconds, 1e-9))
    calls = min(wanted, slots, max(1, drawn, round(SHORT_WINDOW / max(seconds, 1e-9))))
    if planted:
        calls = calls_to_plant(min(wanted, slots, round(1 / planted)), 1, planted)
    while calls > 1 and calls + extra_calls(calls, planted) > slots:
        calls -= 1
    return calls
