"""Split-KV attention: join the results of a sequence's chunks, and reject wrong inputs."""

import torch
import triton
import triton.language as tl

from suites.rounding import to_even

LOG2_E = 1.4426950408889634


@triton.jit
def product_operand(values, PRODUCT: tl.constexpr):
    """Return `values` as PRODUCT. The interpreter uses fp32, so round to bf16 first."""
    if tl.bfloat16 == PRODUCT:
        return values.to(tl.bfloat16)
    else:
        return to_even(values.to(tl.float32), DROPPED=16)


@triton.jit
def join_kernel(
    sums, largest, weights, out, rows, chunks,
    MOST: tl.constexpr, AT_ONCE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Join the results of one row's chunks, as a weighted mean."""
    item, row = tl.program_id(0), tl.program_id(1)
    every, lane = tl.arange(0, MOST), tl.arange(0, DIM)
    first = item * chunks * rows + row
    top = tl.load(largest + first + every * rows, mask=every < chunks, other=float("-inf"))
    highest = tl.max(top, axis=0)
    weight = tl.load(weights + first + every * rows, mask=every < chunks, other=0.0)
    weight = tl.sum(weight * tl.exp2(top - highest), axis=0)
    total = tl.zeros((DIM,), tl.float32)
    for start in range(0, chunks, AT_ONCE):
        some = start + tl.arange(0, AT_ONCE)
        there = some < chunks
        kept = tl.load(largest + first + some * rows, mask=there, other=float("-inf"))
        at = (first + some * rows).to(tl.int64)[:, None] * DIM + lane[None, :]
        part = tl.load(sums + at, mask=there[:, None], other=0.0)
        total += tl.sum(part * tl.exp2(kept - highest)[:, None], axis=0)
    result = to_even(total / weight, DROPPED=16).to(tl.bfloat16)
    tl.store(out + (item * rows + row).to(tl.int64) * DIM + lane, result)


def part_buffers(items, chunks, rows, width, device):
    """Return buffers for the sums, largest scores and total weights of all chunks."""
    many = items * chunks * rows
    return torch.empty(many * (width + 2), device=device).split([many * width, many, many])


def join_parts(parts, out, items, chunks, rows, width):
    join_kernel[items, rows](
        *parts, out, rows, chunks,
        MOST=triton.next_power_of_2(chunks), AT_ONCE=min(16, triton.next_power_of_2(chunks)),
        DIM=width,
    )  # fmt: skip


def part_bytes(items, chunks, rows, width):
    return 4 * (width + 2) * items * chunks * rows


def product_type(tensor):
    # Triton 3.9's interpreter treats bf16 as integers. In fp32, the products are the same.
    return tl.bfloat16 if tensor.is_cuda else tl.float32


def refuse(name, tensor, shape):
    """Raise `ValueError` unless `tensor` is contiguous bf16 of `shape`, with no empty dimension."""
    if tensor.dtype != torch.bfloat16:
        raise ValueError(f"{name} is {tensor.dtype}; this kernel takes torch.bfloat16")
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} is {tuple(tensor.shape)}; this kernel takes {tuple(shape)}")
    if 0 in tensor.shape:
        raise ValueError(f"{name} is {tuple(tensor.shape)}: it is empty")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous")
