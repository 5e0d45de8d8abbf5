"""Everything one pair needs at one size on one device: values, slots, subjects."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..common import trees
from ..common.peers import here
from ..common.protections import on
from ..pages.pair import Pair, Side, Size
from .sides import Subject, make_inputs, make_state

VALUE_SETS = 2
STEPS = 3
"""Steps after which a training step's state is compared, besides the first."""
UNSEEN = VALUE_SETS
"""The value set that is shown only before the last block."""
COLD_FOOTPRINT = 5.0
"""Slots together cover this many L2 caches: cyclic reuse then hits in less than 1 % of accesses."""
MOST_SLOTS = 512


class NotCold(RuntimeError):
    """The working set is too small to be cold by rotation."""


@dataclass
class Workbench:
    """The values and slots of `pair` at `size` on `device`.

    Attributes:
        seed: from which the value sets and the state are drawn.
        unseen_seed: from which the `UNSEEN` set is drawn.
        values: `VALUE_SETS` sets of inputs, and after them the `UNSEEN` one once it was asked for.
        slots: copies of value sets, at addresses that stay the same.
        pattern: which value set each slot holds now.
    """

    pair: Pair
    size: Size
    device: str
    seed: int
    unseen_seed: int
    values: list[tuple[Any, ...]] = field(init=False)
    slots: list[tuple[Any, ...]] = field(init=False, default_factory=list)
    pattern: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.values = [self._draw(self.seed + k) for k in range(VALUE_SETS)]
        self.rng = random.Random(self.seed)

    def value_set(self, k: int) -> tuple[Any, ...]:
        """Return value set `k`. The unseen one is drawn when first asked for: nobody finds it."""
        if k == UNSEEN == len(self.values):
            self.values.append(self._draw(self.unseen_seed))
        return self.values[k]

    def _draw(self, seed: int, rank: int | None = None) -> tuple[Any, ...]:
        return make_inputs(self.pair, self.device, self.size, seed, rank)

    def everyone(self, k: int) -> list[tuple[Any, ...]]:
        """Return value set `k` of every rank; those of the others are drawn anew each time."""
        seed = self.unseen_seed if k == UNSEEN else self.seed + k
        ranks = range(here().world)
        return [self.value_set(k) if r == here().rank else self._draw(seed, r) for r in ranks]

    def lay_slots(self, count: int) -> None:
        """Make `count` slots, each a copy of one value set."""
        self.pattern = [k % VALUE_SETS for k in range(count)]
        self.slots = [trees.clone(self.values[k]) for k in self.pattern]

    def rewrite(self, subjects: Sequence[Subject], *, last: bool = False) -> None:
        """Give each slot other values than it holds, in place, and poison every output.

        The last time, every second slot gets the value set that no side has ever seen: an answer
        remembered by address at any time before is then wrong.
        """
        self.pattern = [self.rng.choice([k for k in (0, 1) if k != now]) for now in self.pattern]
        if last and on("unseen-values"):
            offset = self.rng.randrange(2) if len(self.slots) > 1 else 0
            self.pattern[offset::2] = [UNSEEN] * len(self.pattern[offset::2])
        for slot, k in zip(self.slots, self.pattern, strict=True):
            trees.copy_into(slot, self.value_set(k))
        for subject in subjects if on("poisoned-outputs") else ():
            trees.poison(subject.outputs)

    def new_state(self) -> Any:
        """Return a state as every side begins with it, or None for a page without one."""
        return make_state(self.pair, self.device, self.size, self.seed)

    def every_state(self) -> list[Any]:
        """Return a new state of every rank."""
        where = self.pair, self.device, self.size, self.seed
        return [make_state(*where, rank) for rank in range(here().world)]

    def subject(self, side: Side) -> Subject:
        """Return `side` built on the slots, with a state of its own."""
        return Subject(side, self.slots, self.new_state())

    def slots_for(self, output_bytes: int, l2_bytes: int, free_bytes: int) -> int:
        """Return how many slots make the working set cold, or a few where it may be warm.

        Raises:
            NotCold: when more than `MOST_SLOTS` slots would be needed.
        """
        footprint = max(1, trees.nbytes(self.values[0]) + output_bytes)
        if self.pair.state is not None or self.pair.l2 == "warm" or self.pair.as_called:
            return VALUE_SETS
        wanted = int(-(-COLD_FOOTPRINT * l2_bytes // footprint))
        if wanted > MOST_SLOTS:
            raise NotCold(
                f"{footprint} bytes a call would need {wanted} slots to be cold in a"
                f" {l2_bytes >> 20} MiB L2; declare l2='warm' or a larger size"
            )
        room = int(0.6 * free_bytes // footprint)
        return max(VALUE_SETS, min(wanted, room))

    @property
    def prepared(self) -> bool:
        """Whether a side of the pair is prepared."""
        sides = [self.pair.baseline, *(v.side for v in self.pair.variants)]
        return any(inspect.isgeneratorfunction(s) for s in sides)


@contextmanager
def alone(bench: Workbench, side: Side) -> Iterator[Subject]:
    """Yield `side` on one slot, and let go of both afterwards."""
    with one_slot(bench), closing(bench.subject(side)) as subject:
        yield subject


@contextmanager
def one_slot(bench: Workbench) -> Iterator[None]:
    """Lay one slot, and let go of it afterwards."""
    bench.lay_slots(1)
    try:
        yield
    finally:
        bench.slots.clear()
