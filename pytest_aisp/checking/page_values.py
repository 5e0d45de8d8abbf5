"""Draw the inputs and the state of a page from a seed."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from ..page.pair import Pair, SideError, Size
from ..util import pytree
from ..util.process_group import current_group

if TYPE_CHECKING:
    import torch

RANK_SEEDS = 7919
"""Distance between the seeds of two ranks' inputs."""
STATE_SEED = 500_009
"""Offset added to the seed of a state, so that its random numbers differ from the inputs."""

Inputs: TypeAlias = tuple[object, ...]
"""The arguments of a side."""
Shapes: TypeAlias = dict[str, tuple[int, ...]]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch, numpy and random inside the block. Restore their random states afterwards."""
    import numpy as np
    import torch

    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def make_inputs(pair: Pair, device: str, size: Size, seed: int, rank: int | None = None) -> Inputs:
    """Return the page's inputs for `seed` on `rank`. The default is this process's rank."""
    rank = current_group().rank if rank is None else rank
    with seeded(seed + RANK_SEEDS * rank):
        return draw_inputs(pair, device, size, rank)


def draw_inputs(pair: Pair, device: str, size: Size, rank: int = 0) -> Inputs:
    """Return the page's inputs, drawn from the current random states."""
    import numpy as np
    import torch

    made = pair.inputs(device, **size, **_rank_arguments(pair.inputs, rank))
    if not isinstance(made, tuple):
        raise SideError(
            f"inputs returned a {type(made).__name__}; return a tuple of arguments,"
            " as in `return (x,)`"
        )
    for path, leaf in pytree.leaves(made):
        if isinstance(leaf, (np.ndarray, torch.nn.Module)):
            raise SideError(
                f"inputs holds a {type(leaf).__name__} at {path}, whose values cannot be watched;"
                " return tensors, and declare what a side may change with state="
            )
    return made


def scaled_down(power: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` times 2 to the minus `power`. Integer tensors are returned unchanged."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    exact = tensor.detach() if tensor.element_size() > 1 else tensor.detach().float()  # fp8
    return (exact * 2.0**-power).to(tensor.dtype).requires_grad_(tensor.requires_grad)


def shapes_of(values: Inputs) -> Shapes:
    """Return the shapes of all tensors by path."""
    return {path: tuple(tensor.shape) for path, tensor in pytree.tensors(values)}


def require_equal_shapes(first: Shapes, second: Shapes) -> None:
    """Refuse inputs whose shapes depend on the seed. Other draws must fit into the same memory."""
    for path in first.keys() & second.keys():
        if first[path] != second[path]:
            raise SideError(
                f"inputs returned {path} of shape {first[path]}, and of shape {second[path]}"
                " with another seed; shapes may depend on the size only: choose the lengths"
                " of ragged data from the size, or pad it"
            )


def _rank_arguments(function: Callable[..., object], rank: int) -> dict[str, int]:
    """Return the keyword arguments `rank` and `world`, if `function` takes them."""
    parameters = inspect.signature(function).parameters
    arguments = {"rank": rank, "world": current_group().world}
    return {name: value for name, value in arguments.items() if name in parameters}


def make_state(pair: Pair, device: str, size: Size, seed: int, rank: int | None = None) -> object:
    """Return a new state for `seed`, or None if the page has no state.

    The seed is the same on every rank. States differ only if the page's function uses `rank`.
    """
    if pair.state is None:
        return None
    rank = current_group().rank if rank is None else rank
    with seeded(seed + STATE_SEED):
        state: object = pair.state(device, **size, **_rank_arguments(pair.state, rank))
        return state
