"""The inputs of a pair's sides at one size on one device: value sets, slots, and states."""

from __future__ import annotations

import functools
import inspect
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from ..isolation.protections import enabled
from ..page.pair import PageError, Pair, Side, SideError, Size, side_name
from ..util import pytree
from ..util.device_state import synchronizer, total_bytes
from ..util.process_group import current_group
from .page_values import (
    Inputs,
    make_inputs,
    make_state,
    require_equal_shapes,
    scaled_down,
    shapes_of,
)

VALUE_SETS = 2
STEPS = 3
"""Number of training steps in a check. The state is compared after each step."""
UNSEEN = VALUE_SETS
"""Index of the value set that the sides get only in the last block of windows."""
COLD_FOOTPRINT = 5.0
"""Size of all slots together, in L2 sizes. With this size, less than 1 % of accesses hit the L2."""
MAX_SLOTS = 512
KEPT_SHARE = 1 / 64
"""Value sets and expected outputs larger than this share of the device's memory are not kept."""


class NotCold(PageError):
    """The working set is so small that even many slots cannot keep the L2 cold."""

    code = "problem_error"


@dataclass
class InputPool:
    """The values and slots of `pair` at `size` on `device`.

    Only one large value set is kept in memory. Other large sets are drawn again for each use.
    If the page's `inputs` function returns different values for the same seed, all sets are kept.

    Attributes:
        seed: seed of the value sets and the state.
        unseen_seed: seed of the `UNSEEN` set.
        most_kept: if a value set has more bytes than this, only one set is kept. For outputs, the
            limit is twice as large.
        scaled: True if every value set after the first is scaled down.
        values: the value sets that are kept, by index.
        slots: copies of value sets, at fixed addresses.
        pattern: the index of the value set that each slot now contains.
    """

    pair: Pair
    size: Size
    device: str
    seed: int
    unseen_seed: int
    most_kept: int = field(init=False)
    scaled: bool = field(init=False, default=False)
    values: dict[int, Inputs] = field(init=False, default_factory=dict)
    slots: list[Inputs] = field(init=False, default_factory=list)
    pattern: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.most_kept = int(KEPT_SHARE * total_bytes(self.device))
        self._keeps_all = True
        shapes = shapes_of(self.value_set(0))
        self._keeps_all = pytree.nbytes(self.values[0]) <= self.most_kept
        before = None if self._keeps_all else pytree.checksum(self.values[0])
        require_equal_shapes(shapes, shapes_of(self.value_set(1)))
        if before is not None:
            self._keeps_all = pytree.checksum(self.value_set(0)) != before
        self.rng = random.Random(self.seed)

    def value_set(self, k: int) -> Inputs:
        """Return the `k`-th set of values. Each set is drawn when it is first requested."""
        if k not in self.values:
            if not self._keeps_all:
                self.values.clear()
            self.values[k] = self._draw(k)
        return self.values[k]

    def scale(self, *, on: bool) -> None:
        """Halve value set 1 and quarter the unseen set, or undo that if `on` is False.

        The outputs of some pages, such as the mean of many numbers, hardly depend on the draw.
        Scaling makes the outputs of the value sets differ. A power of two preserves the signs, the
        order, the equality and the symmetry of elements.
        """
        self.scaled = on
        self.values.clear()

    def _draw(self, k: int, rank: int | None = None) -> Inputs:
        seed = self.unseen_seed if k == UNSEEN else self.seed + k
        made = make_inputs(self.pair, self.device, self.size, seed, rank)
        return pytree.map_tensors(functools.partial(scaled_down, k), made) if self.scaled else made

    def all_ranks(self, k: int) -> list[Inputs]:
        """Return value set `k` of every rank. Each call draws the other ranks' sets again."""
        own = current_group().rank
        return [
            self.value_set(k) if rank == own else self._draw(k, rank)
            for rank in range(current_group().world)
        ]

    def lay_slots(self, count: int) -> None:
        """Make `count` slots, each a copy of one value set."""
        self.pattern = [k % VALUE_SETS for k in range(count)]
        self.slots = [pytree.clone(self.value_set(k)) for k in self.pattern]

    def rewrite(self, sides: Sequence[BoundSide], *, last: bool = False) -> None:
        """Write other values into each slot in place, and overwrite every output with NaN.

        If a side has cached answers by address, the cached answers become wrong. Before the last
        block, every second slot gets the value set that no side has seen.
        """
        self.pattern = [self.rng.choice([k for k in (0, 1) if k != now]) for now in self.pattern]
        if last and enabled("unseen-values"):
            offset = self.rng.randrange(2) if len(self.slots) > 1 else 0
            self.pattern[offset::2] = [UNSEEN] * len(self.pattern[offset::2])
        for slot, k in zip(self.slots, self.pattern, strict=True):
            pytree.copy_into(slot, self.value_set(k))
        if enabled("poisoned-outputs"):
            for side in sides:
                pytree.poison(side.outputs)

    def new_state(self) -> object:
        """Return a new state, or None if the page has no state."""
        return make_state(self.pair, self.device, self.size, self.seed)

    def all_states(self) -> list[object]:
        """Return a new state for every rank."""
        where = self.pair, self.device, self.size, self.seed
        return [make_state(*where, rank) for rank in range(current_group().world)]

    def bind(self, side: Side) -> BoundSide:
        """Return `side` bound to the slots, with its own state."""
        return BoundSide(side, self.slots, self.new_state())

    def slots_for(self, output_bytes: int, l2_bytes: int, free_bytes: int) -> int:
        """Return the number of slots that keep the L2 cold, or 1 or 2 if the L2 may be warm.

        Raises:
            NotCold: if more than `MAX_SLOTS` slots would be needed.
        """
        footprint = max(1, pytree.nbytes(self.value_set(0)) + output_bytes)
        few = VALUE_SETS if footprint <= self.most_kept else 1
        if self.pair.state is not None or self.pair.l2 == "warm" or self.pair.as_called:
            return few
        wanted = int(-(-COLD_FOOTPRINT * l2_bytes // footprint))
        if wanted > MAX_SLOTS:
            raise NotCold(
                f"a call uses only {footprint} bytes, so {wanted} copies would be needed to keep"
                f" the L2 of {l2_bytes >> 20} MiB cold; declare l2='warm' or a larger size"
            )
        return max(few, min(wanted, int(0.6 * free_bytes // footprint)))

    @property
    def prepared(self) -> bool:
        """True if a side of the pair has a preparation step."""
        sides = [self.pair.baseline, *(v.side for v in self.pair.variants)]
        return any(inspect.isgeneratorfunction(s) for s in sides)


@contextmanager
def alone(pool: InputPool, side: Side) -> Iterator[BoundSide]:
    """Yield `side` bound to one slot. Free the side and the slot afterwards."""
    with one_slot(pool), closing(pool.bind(side)) as bound:
        yield bound


@contextmanager
def one_slot(pool: InputPool) -> Iterator[None]:
    """Make one slot, and free it afterwards."""
    pool.lay_slots(1)
    try:
        yield
    finally:
        pool.slots.clear()


@functools.cache
def slot_order(calls: int, slots: int, extra: int = 0) -> tuple[int, ...]:
    """Return the slot index of each of `calls` calls and of `extra` more calls.

    The extra calls start halfway around the slots. The next window begins with slot 0, so the data
    of slot 0 must no longer be in the L2.
    """
    return (
        *(call % slots for call in range(calls)),
        *((slots // 2 + call) % slots for call in range(extra)),
    )


class Snapshot:
    """A copy of the values of a state's tensors, which can be restored in place."""

    def __init__(self, state: object) -> None:
        self.state = state
        tensors = pytree.state_tensors(state)
        self.saved = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def restore(self) -> None:
        """Copy the saved values back. Tensors created later (momentum, gradients) become 0."""
        import torch

        with torch.no_grad():
            for name, tensor in pytree.state_tensors(self.state).items():
                if name in self.saved:
                    tensor.copy_(self.saved[name])
                else:
                    tensor.zero_()


class BoundSide:
    """One side bound to its slots, ready to be called.

    Attributes:
        name: the side's name.
        calls: one callable per slot, which runs the side on the slot and returns the outputs.
        outputs: the last outputs of each slot.
        one_off: seconds of preparation per slot (0 for a side without preparation).
        held_bytes: bytes of GPU memory that the preparation keeps per slot (0 without preparation).
        state: the state that the side may change, or None.
    """

    def __init__(self, side: Side, slots: Sequence[Inputs], state: object = None) -> None:
        self.name = side_name(side)
        self.state = state
        self.outputs: list[object] = [None] * len(slots)
        self.one_off, self.held_bytes = 0.0, 0
        self._generators: list[Iterator[object]] = []
        self._snapshot = None if state is None else Snapshot(state)
        arguments = [slot if state is None else (state, *slot) for slot in slots]
        self.calls: list[Callable[[], object]]
        if inspect.isgeneratorfunction(side):
            self._prepare_all(side, arguments)
        else:
            self.calls = [functools.partial(side, *args) for args in arguments]

    def _prepare_all(self, side: Side, arguments: Sequence[Inputs]) -> None:
        import torch

        on_gpu = torch.cuda.is_initialized()
        start, before = time.perf_counter(), torch.cuda.memory_allocated() if on_gpu else 0
        self.calls = [self._prepare(side, args) for args in arguments]
        synchronizer("cuda" if on_gpu else "cpu")()  # include the GPU work of the preparation
        self.one_off = (time.perf_counter() - start) / len(arguments)
        if on_gpu:
            self.held_bytes = max(0, torch.cuda.memory_allocated() - before) // len(arguments)
        self.restore()

    def _prepare(self, side: Side, arguments: Inputs) -> Callable[[], object]:
        generator = side(*arguments)
        call: object = next(generator, None)
        if not callable(call):
            raise SideError(f"{self.name} must yield the callable to time, not {call!r}")
        self._generators.append(generator)
        return call

    def run(self, slot: int) -> object:
        """Run the side on `slot`, store its outputs for this slot, and return them."""
        self.outputs[slot] = out = self.calls[slot]()
        return out

    def cycle(self, calls: int, extra: int = 0) -> None:
        """Run the side `calls` + `extra` times, on the slots that `slot_order` returns."""
        run = self.run
        for slot in slot_order(calls, len(self.calls), extra):
            run(slot)

    def round(self) -> None:
        """Run the side once on every slot."""
        self.cycle(len(self.calls))

    def restore(self) -> None:
        """Reset the state to its initial values."""
        if self._snapshot is not None:
            self._snapshot.restore()

    def close(self) -> None:
        """Run the teardown of a prepared side, and free all outputs."""
        for generator in self._generators:
            if next(generator, None) is not None:
                raise SideError(f"{self.name} yields twice; a prepared side yields once")
        self._generators.clear()
        self.calls, self.outputs, self.state, self._snapshot = [], [], None, None
