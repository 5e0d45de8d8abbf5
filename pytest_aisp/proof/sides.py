"""Sides made ready to run: slots of inputs, prepared callables, states that can be restored.

A `Subject` is one side on its slots. A side that is a function is called with each slot's inputs; a
generator is *prepared*: it gets them once and yields the callable to run. Values of inputs change
in place between windows, so a prepared side may compute ahead only what depends on `state`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..common import trees
from ..common.peers import here
from ..common.quiet import waiter
from ..pages.pair import Pair, Side, SideError, Size, side_name

if TYPE_CHECKING:
    import torch


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
    rank = here().rank if rank is None else rank
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
    return {k: v for k, v in {"rank": rank, "world": here().world}.items() if k in asked}


def _check_inputs(made: tuple[Any, ...]) -> None:
    import numpy as np
    import torch

    for path, leaf in trees.leaves(made):
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
    rank = here().rank if rank is None else rank
    with seeded(seed + STATE_SEED):
        return pair.state(device, **size, **_place(pair.state, rank))


@dataclass
class Snapshot:
    """The tensors of a state as they were, to be put back in place."""

    state: Any
    saved: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        held = trees.state_tensors(self.state)
        self.saved = {name: tensor.detach().clone() for name, tensor in held.items()}

    def restore(self) -> None:
        """Copy the saved values back; tensors made since (momentum, gradients) become zero."""
        import torch

        with torch.no_grad():
            for name, tensor in trees.state_tensors(self.state).items():
                if name in self.saved:
                    tensor.copy_(self.saved[name])
                else:
                    tensor.zero_()


class Subject:
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
            waiter("cuda" if on_gpu else "cpu")()
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
