"""What a side hands back: plain tensors of its own, and its inputs as they were."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..common import trees
from ..common.protections import on
from ..pages.pair import SideError

if TYPE_CHECKING:
    import torch


def check_outputs(name: str, outputs: Any, inputs: Iterable[Any], size: str) -> None:
    """Refuse outputs of the side `name` that were not written: lazy ones, and views of `inputs`."""
    tensors = list(trees.tensors(outputs))
    if on("plain-tensors"):
        for path, tensor in tensors:
            if how := _lazy(tensor):
                raise SideError(
                    f"{name} returned {path} as {how} at {size}; an output is a plain tensor, whose"
                    " values are there"
                )
    if on("no-alias"):
        given = {t.untyped_storage().data_ptr() for slot in inputs for _, t in trees.tensors(slot)}
        for path, tensor in tensors:
            if tensor.numel() and tensor.untyped_storage().data_ptr() in given:
                raise SideError(f"{name} returned {path} as a view of its input at {size}")


def _lazy(tensor: torch.Tensor) -> str | None:
    """Return what `tensor` is if its elements are not all written in memory, else None."""
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__}"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_neg() or tensor.is_conj():
        return "a tensor whose sign is left to its reader"
    if any(stride == 0 < length - 1 for stride, length in zip(tensor.stride(), tensor.shape)):  # noqa: B905
        return "an expanded tensor"
    return None


def check_unchanged(name: str, slot: Any, values: Any, size: str) -> None:
    """Refuse a side that changed an input, by a single bit."""
    import torch

    if not on("inputs-unchanged"):
        return
    now, before = list(trees.leaves(slot)), list(trees.leaves(values))
    if [path for path, _ in now] != [path for path, _ in before]:
        raise _changed(name, "", size)
    for (path, leaf), (_, was) in zip(now, before, strict=True):
        if isinstance(leaf, torch.Tensor):
            same = torch.equal(_bits(leaf), _bits(was))
        else:
            same = leaf is was or not isinstance(leaf, (int, float, str)) or leaf == was
        if not same:
            raise _changed(name, path, size)


def _changed(name: str, path: str, size: str) -> SideError:
    what = f"input {path}" if path else "inputs: one is gone, or new"
    return SideError(
        f"{name} changed its {what} at {size}; what a side may change is declared with state="
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes, so that NaN equals itself."""
    import torch

    flat = tensor.detach().contiguous().view(-1)
    return flat if flat.dtype == torch.bool else flat.view(torch.uint8)
