"""Remarks about inputs on which a wrong side may give the right answer.

Such inputs are constant, have equal elements or a low rank, or contain NaN. Pages with such inputs
are not refused, because correct pages use them too. To keep remarks rare, small tensors, tables of
integers, masks with both values, and small constant tables of floats are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..util import pytree
from .inputs import InputPool
from .page_values import Inputs

if TYPE_CHECKING:
    import torch

FEWEST = 64
"""Tensors with fewer elements, such as scales, are left out."""
SAMPLE = 1024
"""Number of elements that are inspected."""
ROWS, LOW_RANK, NOISE = 32, 4, 1e-3
"""The number of rows and columns in a matrix's sample. The sample's rank is low if at most
`LOW_RANK` singular values are above `NOISE` times the largest one.
"""
SHARE = 0.5
"""A constant tensor of floats gets a remark if it has more than this share of all input floats."""


@dataclass(frozen=True)
class _Draw:
    """Facts about a value set. The value set itself may be too large to keep.

    Attributes:
        samples: some elements of each tensor, at the same places in each draw, by path.
        floats: the number of elements of each tensor of floats.
        low_rank: the paths of matrices of low rank.
    """

    samples: dict[str, torch.Tensor]
    floats: dict[str, int]
    low_rank: set[str]


def input_remarks(pool: InputPool) -> list[str]:
    """Return a sentence for each input tensor with suspicious values."""
    remarks = nan_remarks(pool)
    draw, other = _look(pool.value_set(0)), _look(pool.value_set(1))
    for path, sample in draw.samples.items():
        second = other.samples[path]
        constant = bool((sample == second).all())
        if bool((sample == sample[0]).all() and (second == second[0]).all()):
            always = " in every draw" if constant else ""
            remarks.append(f"inputs{path}: all elements are equal{always}")
        elif constant and draw.floats.get(path, 0) > SHARE * sum(draw.floats.values()):
            remarks.append(f"inputs{path}: the values are the same in every draw")
        elif not constant and path in draw.low_rank:
            remarks.append(f"inputs{path}: the rank is at most {LOW_RANK}")
    return remarks


def nan_remarks(pool: InputPool) -> list[str]:
    """Return a sentence for each input tensor that contains NaN."""
    found = ((path, tensor, _nans(tensor)) for path, tensor in pytree.tensors(pool.value_set(0)))
    return [
        f"inputs{path}: {count} of {tensor.numel()} elements are NaN"
        for path, tensor, count in found
        if count
    ]


def _nans(tensor: torch.Tensor) -> int:
    import torch

    if not tensor.is_floating_point() or tensor.layout != torch.strided:
        return 0
    parts = (tensor.detach()[at] for at in pytree.pieces(tensor.shape))
    if tensor.element_size() == 1:
        parts = (part.float() for part in parts)
    return sum(int(part.isnan().sum()) for part in parts)


def _look(inputs: Inputs) -> _Draw:
    tensors = {path: tensor.detach() for path, tensor in pytree.tensors(inputs) if _fits(tensor)}
    floats = {path: tensor for path, tensor in tensors.items() if tensor.is_floating_point()}
    return _Draw(
        {path: _sample(tensor) for path, tensor in tensors.items()},
        {path: tensor.numel() for path, tensor in floats.items()},
        {path for path, tensor in floats.items() if _has_low_rank(tensor)},
    )


def _fits(tensor: torch.Tensor) -> bool:
    import torch

    return tensor.layout == torch.strided and tensor.numel() >= FEWEST and not tensor.is_quantized


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    eight_bits = tensor.is_floating_point() and tensor.element_size() == 1
    indexable = tensor.view(torch.uint8) if eight_bits else tensor
    return indexable[_places(tensor.shape, SAMPLE, tensor.device)]


def _has_low_rank(tensor: torch.Tensor) -> bool:
    """Return whether a random part of `tensor` (a matrix or a batch of matrices) has a low rank."""
    import torch

    if tensor.dim() < 2 or min(tensor.shape[-2:]) < ROWS or tensor.element_size() < 2:
        return False
    for _ in tensor.shape[:-2]:
        tensor = tensor[0]
    rows, columns = (_places([n], ROWS, tensor.device)[0] for n in tensor.shape)
    part = tensor[rows][:, columns].double()
    if not bool(part.isfinite().all()) or int((part == 0).sum()) > part.numel() / 2:
        return False  # `tensor` is a sparse matrix or a mask of scores
    part = part - part.mean()  # all elements may share a large offset
    part = part / part.norm(dim=1, keepdim=True).clamp_min(1e-300)
    values = torch.linalg.svdvals(part / part.norm(dim=0).clamp_min(1e-300))
    return int((values > NOISE * values[0]).sum()) <= LOW_RANK


def _places(shape: Sequence[int], count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return `count` random indices for each dimension. Every call returns the same indices."""
    import torch

    rng = torch.Generator().manual_seed(0)
    return tuple(torch.randint(n, (count,), generator=rng, device="cpu").to(device) for n in shape)
