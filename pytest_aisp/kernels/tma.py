"""Tensor maps, which tell the tensor memory accelerator (TMA) where a tensor's tiles are.

A kernel takes one as ``const __grid_constant__ CUtensorMap map``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from .launch_config import LaunchError

if TYPE_CHECKING:
    import cuda.core
    import torch

SWIZZLES = {0: "NONE", 32: "SWIZZLE_32B", 64: "SWIZZLE_64B", 128: "SWIZZLE_128B"}
PROMOTIONS = {0: "NONE", 64: "L2_64B", 128: "L2_128B", 256: "L2_256B"}
BOX = 256
"""Most elements of a tile along one dimension."""
GRAIN = 16
"""Alignment in bytes of a tensor, its rows and a tile's rows."""
RANK = 5


@dataclass(frozen=True)
class TensorMap:
    """A map of `tensor`, which it keeps alive, in tiles of `box` elements; pass it to a kernel."""

    tensor: torch.Tensor
    box: tuple[int, ...]
    descriptor: cuda.core.TensorMapDescriptor


def tensor_map(
    tensor: torch.Tensor, box: Sequence[int], *, swizzle: int = 0, promotion: int = 128
) -> TensorMap:
    """Return a map of `tensor` in tiles of `box` elements, by dimension as in its shape.

    Elements beyond the tensor's edge are read as zero and never written. Elements of one and two
    bytes are passed as integers: a kernel can load and store them, but not reduce into them.

    Args:
        box: 1 to 256 elements in each dimension; a row (the last dimension) must be a multiple of
            16 bytes.
        swizzle: 32, 64 or 128 bytes: the pattern in which 16-byte pieces of a tile's rows are
            exchanged in shared memory. A row must not be longer.
        promotion: 64, 128 or 256 bytes that a miss brings into the L2.

    Raises:
        LaunchError: the accelerator cannot address this.
    """
    __tracebackhide__ = True
    box = tuple(box)
    for fault in _faults(tensor, box, swizzle, promotion):
        dtype = str(tensor.dtype).removeprefix("torch.")
        what = f"a {dtype} tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}"
        raise LaunchError(f"tensor_map of {what} in tiles of {box}: {fault}")
    return TensorMap(tensor, box, _encode(tensor, box, swizzle, promotion))


def _faults(
    tensor: torch.Tensor, box: tuple[int, ...], swizzle: int, promotion: int
) -> Iterator[str]:
    size, rank = tensor.element_size(), tensor.dim()
    if not tensor.is_cuda:
        yield "it is on the CPU; the accelerator reads GPU memory"
    if not 1 <= rank <= RANK or len(box) != rank:
        yield f"needs 1 to {RANK} dimensions, and as many in the tile"
    if not all(isinstance(n, int) and 1 <= n <= BOX for n in box):
        yield f"a tile has 1 to {BOX} elements in each dimension"
    if size not in _SAME_WIDTH or tensor.is_complex() or not tensor.numel():
        yield "needs elements of 1, 2, 4 or 8 bytes, and at least one"
    if tensor.stride(-1) != 1:
        yield "its last dimension must be contiguous"
    if any(s * size % GRAIN or s < 1 for s in tensor.stride()[:-1]) or tensor.data_ptr() % GRAIN:
        yield f"each row must begin at a multiple of {GRAIN} bytes"
    if box[-1] * size % GRAIN:
        yield f"a row of a tile is {box[-1] * size} bytes; needs a multiple of {GRAIN}"
    if swizzle not in SWIZZLES or promotion not in PROMOTIONS:
        yield f"swizzle is one of {list(SWIZZLES)}, promotion of {list(PROMOTIONS)}"
    if swizzle and box[-1] * size > swizzle:
        yield f"a row of a tile is {box[-1] * size} bytes; swizzle={swizzle} has at most that many"


_SAME_WIDTH = {1: "uint8", 2: "uint16", 4: "int32", 8: "int64"}


def _encode(
    tensor: torch.Tensor, box: tuple[int, ...], swizzle: int, promotion: int
) -> cuda.core.TensorMapDescriptor:
    """Return the descriptor; nothing waits, so this is legal while a graph is captured."""
    import torch

    maps = import_module("cuda.core._tensor_map")  # cuda.core does not export its enums
    plain = tensor.detach()
    if not tensor.is_floating_point() or tensor.element_size() < 4:
        plain = plain.view(getattr(torch, _SAME_WIDTH[tensor.element_size()]))
    view = import_module("cuda.core.utils").StridedMemoryView.from_dlpack(plain, stream_ptr=-1)
    return view.as_tensor_map(
        box,
        swizzle=maps.TensorMapSwizzle[SWIZZLES[swizzle]],
        l2_promotion=maps.TensorMapL2Promotion[PROMOTIONS[promotion]],
    )
