"""Nested structures of tensors: inputs and outputs of sides, and states."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ..page.pair import PageError

if TYPE_CHECKING:
    import torch

Tree = TypeVar("Tree")
PIECE = 1 << 23
"""The maximum number of elements in a piece of a large tensor. In float64 this is 64 MiB."""


class TreeError(PageError):
    """The tree contains a value that cannot be compared or restored."""


def leaves(tree: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield ``(path, leaf)`` of nested tuples, lists, mappings, dataclasses and namespaces."""
    children = _children(tree)
    if children is None:
        yield path or "output", tree
        return
    for key, child in children:
        yield from leaves(child, f"{path}{key}" if path else key.lstrip("."))


def tensors(tree: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors among the leaves of `tree`."""
    import torch

    for path, leaf in leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield path, leaf


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Tree) -> Tree:
    """Return `tree` with `function` applied to each tensor. Other leaves stay the same."""
    mapped: Tree = _map(function, tree)
    return mapped


def _map(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    import torch

    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(function, child) for child in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(_map(function, child) for child in tree)
    if isinstance(tree, Mapping):
        return {key: _map(function, child) for key, child in tree.items()}
    if (fields := _fields(tree)) is not None:
        mapped = copy.copy(tree)
        for name, child in fields:
            object.__setattr__(mapped, name, _map(function, child))  # also in a frozen dataclass
        return mapped
    return tree


def clone(tree: Tree) -> Tree:
    """Return `tree` with a copy of every tensor. Copies keep strides and pinned memory."""
    return map_tensors(_clone, tree)


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    pinned = tensor.device.type == "cpu" and torch.cuda.is_available() and tensor.is_pinned()
    with torch.no_grad():
        copied = torch.empty_like(tensor, pin_memory=pinned)
        copied.copy_(tensor)
    return copied.requires_grad_(tensor.requires_grad)


def copy_into(target: object, source: object) -> None:
    """Copy every tensor of `source` into the tensor at the same place in `target`.

    `Tensor._version` does not show that a plain tensor has new values.
    """
    import torch

    with torch.no_grad():
        for (_, t), (_, s) in zip(tensors(target), tensors(source), strict=True):
            plain = type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout == torch.strided
            (t.data if plain else t).copy_(s)


def poison(tree: object) -> None:
    """Overwrite every tensor of `tree` with NaN. If a dtype has no NaN, set all bits."""
    import torch

    with torch.no_grad():
        for _, tensor in tensors(tree):
            if tensor.dtype == torch.bool:
                tensor.logical_not_()
            elif tensor.is_contiguous():
                tensor.view(-1).view(torch.uint8).fill_(0xFF)
            elif tensor.is_floating_point() or tensor.is_complex():
                tensor.fill_(float("nan"))
            else:
                tensor.fill_(-1)


def nbytes(tree: object) -> int:
    """Return the bytes of all tensors in `tree`. A storage that views share is counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for _, t in tensors(tree)}
    return sum(s.nbytes() for s in storages.values())


Piece: TypeAlias = tuple[int | slice, ...]
"""The index of a part of a tensor."""


def pieces(shape: Sequence[int], most: int | None = None) -> Iterator[Piece]:
    """Yield indices that divide a tensor of `shape` into pieces of at most `most` elements.

    A small tensor is one piece with an empty index. The last entry of any other index is a slice.
    """
    most = most or PIECE
    if math.prod(shape) <= most:
        yield ()
        return
    row = math.prod(shape[1:])
    if row > most:
        for number in range(shape[0]):
            for piece in pieces(shape[1:], most):
                yield number, *piece
        return
    step = most // row
    for start in range(0, shape[0], step):
        yield (slice(start, min(start + step, shape[0])),)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor. Two NaNs are never equal as values, but their bytes can be."""
    import torch

    flat = tensor.detach().contiguous().view(-1)
    return flat if flat.dtype == torch.bool else flat.view(torch.uint8)


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape and the same bytes."""
    import torch

    if a.shape != b.shape:
        return False
    return all(torch.equal(bits(a[at]), bits(b[at])) for at in pieces(a.shape))


def checksum(tree: object) -> list[int]:
    """Return a sum over the bytes of each tensor in `tree`."""
    sums = []
    for _, tensor in tensors(tree):
        sums.append(sum(int(bits(tensor[at]).sum()) for at in pieces(tensor.shape)))
    return sums


def state_tensors(state: object) -> dict[str, torch.Tensor]:
    """Return every tensor in `state`, including gradients, keyed by name.

    A state may consist of tensors, modules, optimizers, and containers of them.

    Raises:
        TreeError: the state contains an object of another type, which could change undetected.
    """
    return dict(_state(state, "state"))


def state_values(state: object) -> dict[str, object]:
    """Return the tensors, numbers and strings of `state` by name."""
    plain = {path: leaf for path, leaf in leaves(state) if isinstance(leaf, (int, float, str))}
    return {**plain, **state_tensors(state)}


def equal_values(old: Mapping[str, object], new: Mapping[str, object]) -> bool:
    """Return whether two results of `state_values` are equal, in tensors of any type."""
    import torch

    def same(a: object, b: object) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return torch.equal(a.double(), b.double())  # a reference may change a model's dtype
        return type(a) is type(b) and a == b

    return old.keys() == new.keys() and all(same(old[name], new[name]) for name in old)


def _state(value: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield path, value
        if value.is_leaf and value.grad is not None:
            yield f"{path}.grad", value.grad
    elif isinstance(value, torch.nn.Module):
        for name, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield from _state(tensor, f"{path}.{name}")
    elif isinstance(value, torch.optim.Optimizer):
        # The names use the parameter's number, because a sharded optimizer has entries for only
        # some parameters.
        parameters = [p for group in value.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            for name, leaf in value.state.get(parameter, {}).items():
                if isinstance(leaf, torch.Tensor):
                    yield f"{path}[{index}].{name}", leaf
    elif (children := _children(value)) is not None:
        for key, child in children:
            yield from _state(child, f"{path}{key}")
    elif not (value is None or isinstance(value, (int, float, bool, str))):
        raise TreeError(
            f"{path} is a {type(value).__name__}; a state may hold tensors, modules, optimizers"
            " and containers of them"
        )


def _children(tree: object) -> list[tuple[str, object]] | None:
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f".{name}", child) for name, child in zip(tree._fields, tree, strict=True)]
    if isinstance(tree, (tuple, list)):
        return [(f"[{i}]", child) for i, child in enumerate(tree)]
    if isinstance(tree, Mapping):
        return [(f"[{key!r}]", child) for key, child in tree.items()]
    if (fields := _fields(tree)) is not None:
        return [(f".{name}", child) for name, child in fields]
    return None


def _fields(tree: object) -> list[tuple[str, object]] | None:
    """Return the names and values in a dataclass or a namespace, or None for other types."""
    if isinstance(tree, SimpleNamespace):
        return list(vars(tree).items())
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    return None
