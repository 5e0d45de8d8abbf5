"""Everything one pair needs at one size on one device: values, slots, subjects."""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..isolation.protections import enabled
from ..page.pair import Pair, Side, SideError, Size, side_name
from ..util import pytree
from ..util.device_state import synchronizer
from ..util.process_group import current_group

if TYPE_CHECKING:
    import torch


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
class InputPool:
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
        ranks = range(current_group().world)
        return [
            self.value_set(k) if r == current_group().rank else self._draw(seed, r) for r in ranks
        ]

    def lay_slots(self, count: int) -> None:
        """Make `count` slots, each a copy of one value set."""
        self.pattern = [k % VALUE_SETS for k in range(count)]
        self.slots = [pytree.clone(self.values[k]) for k in self.pattern]

    def rewrite(self, subjects: Sequence[BoundSide], *, last: bool = False) -> None:
        """Give each slot other values than it holds, in place, and poison every output.

        The last time, every second slot gets the value set that no side has ever seen: an answer
        remembered by address at any time before is then wrong.
        """
        self.pattern = [self.rng.choice([k for k in (0, 1) if k != now]) for now in self.pattern]
        if last and enabled("unseen-values"):
            offset = self.rng.randrange(2) if len(self.slots) > 1 else 0
            self.pattern[offset::2] = [UNSEEN] * len(self.pattern[offset::2])
        for slot, k in zip(self.slots, self.pattern, strict=True):
            pytree.copy_into(slot, self.value_set(k))
        for subject in subjects if enabled("poisoned-outputs") else ():
            pytree.poison(subject.outputs)

    def new_state(self) -> Any:
        """Return a state as every side begins with it, or None for a page without one."""
        return make_state(self.pair, self.device, self.size, self.seed)

    def every_state(self) -> list[Any]:
        """Return a new state of every rank."""
        where = self.pair, self.device, self.size, self.seed
        return [make_state(*where, rank) for rank in range(current_group().world)]

    def subject(self, side: Side) -> BoundSide:
        """Return `side` built on the slots, with a state of its own."""
        return BoundSide(side, self.slots, self.new_state())

    def slots_for(self, output_bytes: int, l2_bytes: int, free_bytes: int) -> int:
        """Return how many slots make the working set cold, or a few where it may be warm.

        Raises:
            NotCold: when more than `MOST_SLOTS` slots would be needed.
        """
        footprint = max(1, pytree.nbytes(self.values[0]) + output_bytes)
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
def alone(bench: InputPool, side: Side) -> Iterator[BoundSide]:
    """Yield `side` on one slot, and let go of both afterwards."""
    with one_slot(bench), closing(bench.subject(side)) as subject:
        yield subject


@contextmanager
def one_slot(bench: InputPool) -> Iterator[None]:
    """Lay one slot, and let go of it afterwards."""
    bench.lay_slots(1)
    try:
        yield
    finally:
        bench.slots.clear()


@functools.cache
def slot_order(calls: int, slots: int, extra: int = 0) -> tuple[int, ...]:
    """Return the slot of each of `calls` calls, one after the other, and of `extra` ones more.

    The extra ones go on half a turn further: the next window begins with slot 0, and no slot may
    come again while the L2 still holds it.
    """
    return (
        *(call % slots for call in range(calls)),
        *((slots // 2 + call) % slots for call in range(extra)),
    )


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch, numpy and random inside the block, and restore them after it."""
    import numpy as np
    import torch

    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


RANK_SEEDS = 7919
"""How far apart the seeds of two ranks' inputs lie."""
STATE_SEED = 500_009
"""Added to the seed of a state: drawn from that of the inputs it would begin with their numbers."""


def make_inputs(
    pair: Pair, device: str, size: Size, seed: int, rank: int | None = None
) -> tuple[Any, ...]:
    """Return the page's inputs for `seed` on `rank` (None: this one), always a tuple."""
    rank = current_group().rank if rank is None else rank
    with seeded(seed + RANK_SEEDS * rank):
        made = pair.inputs(device, **size, **_place(pair.inputs, rank))
    if not isinstance(made, tuple):
        raise SideError(
            f"inputs returned a {type(made).__name__}; return a tuple of arguments,"
            " as in `return (x,)`"
        )
    _check_inputs(made)
    return made


def _place(function: Callable[..., Any], rank: int) -> dict[str, int]:
    """Return which of `rank` and `world` the page's function asks for."""
    asked = inspect.signature(function).parameters
    return {k: v for k, v in {"rank": rank, "world": current_group().world}.items() if k in asked}


def _check_inputs(made: tuple[Any, ...]) -> None:
    import numpy as np
    import torch

    for path, leaf in pytree.leaves(made):
        if isinstance(leaf, (np.ndarray, torch.nn.Module)):
            raise SideError(
                f"inputs holds a {type(leaf).__name__} at {path}, whose values cannot be watched;"
                " return tensors, and declare what a side may change with state="
            )


def make_state(pair: Pair, device: str, size: Size, seed: int, rank: int | None = None) -> Any:
    """Return a new state for `seed`, or None for a page without one.

    The seed is the same on every rank: what differs between them the page takes from `rank`.
    """
    if pair.state is None:
        return None
    rank = current_group().rank if rank is None else rank
    with seeded(seed + STATE_SEED):
        return pair.state(device, **size, **_place(pair.state, rank))


@dataclass
class Snapshot:
    """The tensors of a state as they were, to be put back in place."""

    state: Any
    saved: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        held = pytree.state_tensors(self.state)
        self.saved = {name: tensor.detach().clone() for name, tensor in held.items()}

    def restore(self) -> None:
        """Copy the saved values back; tensors made since (momentum, gradients) become zero."""
        import torch

        with torch.no_grad():
            for name, tensor in pytree.state_tensors(self.state).items():
                if name in self.saved:
                    tensor.copy_(self.saved[name])
                else:
                    tensor.zero_()


class BoundSide:
    """One side on its slots, ready to be called.

    Attributes:
        name: the side's name.
        calls: one callable a slot; each returns that slot's outputs.
        outputs: by slot, what the last call returned.
        one_off: seconds that preparing took (0 for a function).
        held: bytes on the GPU that preparing keeps, a slot (0 for a function).
        state: what the side may change, or None.
    """

    def __init__(self, side: Side, slots: Sequence[tuple[Any, ...]], state: Any = None) -> None:
        self.name = side_name(side)
        self.state = state
        self.outputs: list[Any] = [None] * len(slots)
        self.one_off, self.held = 0.0, 0
        self._generators: list[Any] = []
        self._snapshot = None if state is None else Snapshot(state)
        arguments = [(state, *slot) if state is not None else slot for slot in slots]
        if inspect.isgeneratorfunction(side):
            import torch

            on_gpu = torch.cuda.is_initialized()
            start, before = time.perf_counter(), torch.cuda.memory_allocated() if on_gpu else 0
            self.calls = [self._prepare(side, args) for args in arguments]
            # What preparing has launched belongs to its cost.
            synchronizer("cuda" if on_gpu else "cpu")()
            self.one_off = (time.perf_counter() - start) / len(slots)
            if on_gpu:
                self.held = max(0, torch.cuda.memory_allocated() - before) // len(slots)
            self.restore()
        else:
            self.calls = [functools.partial(side, *args) for args in arguments]

    def _prepare(self, side: Side, arguments: tuple[Any, ...]) -> Callable[[], Any]:
        generator = side(*arguments)
        run = next(generator, None)
        if not callable(run):
            raise SideError(f"{self.name} must yield the callable to time, not {run!r}")
        self._generators.append(generator)
        return run  # type: ignore[no-any-return]

    def run(self, slot: int) -> Any:
        """Run the side on `slot`, keep its outputs there and return them."""
        self.outputs[slot] = out = self.calls[slot]()
        return out

    def cycle(self, calls: int, extra: int = 0) -> None:
        """Run the side `calls` times, and `extra` times, in the order of `slot_order`."""
        run = self.run
        for slot in slot_order(calls, len(self.calls), extra):
            run(slot)

    def round(self) -> None:
        """Run the side once on every slot."""
        self.cycle(len(self.calls))

    def restore(self) -> None:
        """Put the state back to where it began."""
        if self._snapshot is not None:
            self._snapshot.restore()

    def close(self) -> None:
        """Let prepared sides tear down, and drop every output."""
        for generator in self._generators:
            if next(generator, None) is not None:
                raise SideError(f"{self.name} yields twice; a prepared side yields once")
        self._generators.clear()
        self.calls, self.outputs, self.state, self._snapshot = [], [], None, None
