"""Compressed all-reduce: send gradients in fewer bits, but add them in fp32.

Problem    Sum `n` fp32 gradients over the ranks. Each rank gets the sum in fp32.
Baseline   fp32: an all-reduce of a copy of the gradients.
Optimized  bf16: cast to bf16, all-reduce half as many bytes as fp32, and cast back.
           int8: blocks of 32 elements share a power of two as their scale (MXINT8 of the OCP
           formats). Each rank receives one part of the gradients from all other ranks, adds in
           fp32, and quantizes the sum. Then all ranks gather the sums. A plain all-reduce of int8
           would overflow, and the scales differ between ranks.
Bound      NVLink. `int8` sends 33 bytes per 32 elements in each of its two phases. The three
           kernels of int8 and the casts of bf16 add DRAM traffic. `bf16` keeps 8 significant bits
           of each addend and of the sum. `int8` keeps 7 bits of the largest element in each block.
           NVLink multicast was off (README). With four GPUs or more, multicast could shorten fp32
           and bf16, but not int8, because the switch cannot add blocks with scales.
Seen       On two GPUs, `fp32` takes slightly longer than predicted, and the gap is larger for bf16
           and int8. The predictions use the rate of an all-reduce of the same size as in fp32.
           `bf16` sends smaller messages, and int8 uses all-to-all and all-gather, so both run at a
           lower rate. With the rates that the README's plot shows for these sizes, the predictions
           are within 20 % of the measured times. On four GPUs, both variants gain more, because
           each rank sends more bytes, and casts and scales take a smaller part of the time. There,
           all sides are closer to the predictions.
Use when   The links limit the step, and the optimizer tolerates the error. Data-parallel training
           usually tolerates bf16 gradients. On NVLink, `int8` is rarely worth its error. `int8`
           pays off between machines, where links are many times slower.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from pytest_aisp import Conditions, Cost, Variant, Work, compare

from .wire_costs import all_reduce_of, exchange

BLOCK = tl.constexpr(32)  # elements that share a scale
ROWS = 128  # blocks per program


def inputs(device, n):
    return (torch.randn(n, device=device),)


def reference(ranks):
    total = sum(g.double() for (g,) in ranks)
    return [total] * len(ranks)


def fp32(g):
    out = g.clone()
    dist.all_reduce(out)
    return out


def bf16(g):
    low = g.bfloat16()
    dist.all_reduce(low)
    return low.float()


@triton.jit
def encode(value):
    """Return the rows' codes and biased exponents: value = code * 2 ** (exponent - 127 - 6)."""
    bits = tl.minimum(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800000)
    most = tl.max(bits, axis=1) + (1 << 16)  # if the largest would round to 128, use the next power
    exponent = tl.maximum(most >> 23, 7)  # 255 if there is a NaN or an Inf
    inverse = ((260 - exponent) << 23).to(tl.float32, bitcast=True)
    code = tl.floor(value * inverse[:, None] + 0.5)
    return code.to(tl.int8), exponent.to(tl.uint8)


@triton.jit
def decode(code, exponent):
    exponent = exponent.to(tl.int32)
    step = ((exponent - 6) << 23).to(tl.float32, bitcast=True)
    step = tl.where(exponent == 255, float("nan"), step)
    return code.to(tl.float32) * step[:, None]


@triton.jit
def quantize_kernel(values, codes, exponents, n, blocks, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    code, exponent = encode(tl.load(values + at, mask=at < n, other=0.0))
    tl.store(codes + at, code, mask=row[:, None] < blocks)
    tl.store(exponents + row, exponent, mask=row < blocks)


@triton.jit
def sum_kernel(
    codes, exponents, out, out_exponents, blocks, WORLD: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = row < blocks
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for rank in tl.static_range(WORLD):
        first = rank * blocks
        code = tl.load(codes + first * BLOCK + at, mask=there[:, None], other=0)
        total += decode(code, tl.load(exponents + first + row, mask=there, other=7))
    code, exponent = encode(total)
    tl.store(out + at, code, mask=there[:, None])
    tl.store(out_exponents + row, exponent, mask=there)


@triton.jit
def dequantize_kernel(codes, exponents, out, n, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = row * BLOCK < n
    code = tl.load(codes + at, mask=there[:, None], other=0)
    value = decode(code, tl.load(exponents + row, mask=there, other=7))
    tl.store(out + at, value, mask=at < n)


def blocks_like(g, blocks):
    codes = torch.empty(blocks, BLOCK.value, dtype=torch.int8, device=g.device)
    return codes, torch.empty(blocks, dtype=torch.uint8, device=g.device)


def int8(g):
    n, world = g.numel(), dist.get_world_size()
    part = triton.cdiv(n, BLOCK.value * world)  # blocks that one rank adds
    blocks = part * world
    mine, theirs, whole = blocks_like(g, blocks), blocks_like(g, blocks), blocks_like(g, blocks)
    added = blocks_like(g, part)
    out = torch.empty_like(g)
    quantize_kernel[triton.cdiv(blocks, ROWS),](g, *mine, n, blocks, ROWS)
    for received, sent in zip(theirs, mine, strict=True):
        dist.all_to_all_single(received, sent)
    sum_kernel[triton.cdiv(part, ROWS),](*theirs, *added, part, world, ROWS)
    for gathered, sent in zip(whole, added, strict=True):
        dist.all_gather_into_tensor(gathered, sent)
    dequantize_kernel[triton.cdiv(blocks, ROWS),](*whole, out, n, ROWS)
    return out


def cast(n, read, write):
    return Cost(read=read * n, write=write * n, launches=1)


def in_fp32(n, world):
    return cast(n, 4, 4) + all_reduce_of(4 * n, world)


def in_bf16(n, world):
    return cast(n, 4, 2) + all_reduce_of(2 * n, world) + cast(n, 2, 4)


def in_int8(n, world):
    """Return the cost of `int8`, which sends codes and scales (a byte per 32 codes) separately."""
    quantized = 33 / 32
    sent_and_received = exchange(n, world) + exchange(n / 32, world)
    return (
        cast(n, 4, quantized)
        + sent_and_received
        + cast(n, quantized, quantized / world)
        + sent_and_received
        + cast(n, quantized, 4)
    )


@compare(
    baseline=fp32,
    optimized=[
        Variant(bf16, precision="bf16", at_least={"sm90": 1.2}),
        Variant(int8, precision="int8", at_least={"sm90": 1.7}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 1 << 27}],
    check_sizes=[{"n": 33}, {"n": 10007}],
    # No side sends fewer than 33 bytes per 32 elements.
    work=lambda n, world: Work(wire=2 * (world - 1) / world * 33 / 32 * n, terms=world),
    bound="nvlink",
    costs={fp32: in_fp32, bf16: in_bf16, int8: in_int8},
    conditions=Conditions(gpus=(2, 4)),
)
def test_compressed(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
