"""Blocks that share a scale: quantize to MXFP8 or NVFP4 in one pass.

Problem    Quantize x (rows, k) from bf16 to codes and scales. Matrix products on a Blackwell GPU
           take the same codes and scales, but need the scales in a different order. MXFP8 has an
           e4m3 code per element, and a one-byte scale, a power of two, per 32 elements. NVFP4 has
           an e2m1 code per element, two codes in a byte, and an e4m3 scale per 16 elements. NVFP4
           also has a scale for the whole tensor, which is 1 here.
Baseline   eager: the definition of MXFP8 in PyTorch, one kernel for each operation.
           compiled_fp4: the definition of NVFP4 through `torch.compile`. An eager baseline would be
           too easy to beat: PyTorch has no cast to e2m1, so it would launch two kernels for each of
           seven comparisons.
Optimized  compiled: like `eager`, through `torch.compile`.
           fused: changes `eager`. One Triton kernel does all operations.
           fused_fp4: changes `compiled_fp4`. One Triton kernel does all operations.
Bound      DRAM limits MXFP8. One pass reads 2 bytes per element and writes about 1. `eager` writes
           and reads its intermediate values, most of them in fp32. `fused` runs 19 instructions per
           element on sm90. On an H200, these instructions take about as long as the reads and
           writes. Instructions limit NVFP4: `fused_fp4` runs 35 instructions per element, because
           it compares each element with seven midpoints. Comparisons are exact, and a division
           would round. On an H200, these instructions take almost twice as long as the reads and
           writes. `compiled_fp4` makes the same comparisons, but first stores each code in a byte.
           A second kernel packs two codes into one byte.
Seen       On both GPUs, `compiled_fp4` takes more than twice as long as predicted, which explains
           most of the gain of `fused_fp4`. `fused_fp4` takes as long on an H200 as on an H100, as
           it must if instructions limit it. On an H200, `fused` takes a third longer than
           predicted, and `compiled`, which does the same work, a sixth longer. The instructions and
           the reads and writes probably do not overlap fully, least of all in `fused`. The cost of
           `compiled_fp4` assumes as many instructions per element as `fused_fp4` has.
           `compiled_fp4` probably runs more, but we did not examine its GPU code. `eager` takes
           longer than predicted from its passes. Two kinds of kernels are probably slower than a
           copy: kernels that find the largest of 32 elements, and kernels that multiply by a factor
           per block. We did not time the kernels of `eager` one by one.
Use when   You quantize in the call, as for activations. The time to quantize can decide whether the
           low-precision product is faster than bf16, so quantize in one pass. For MXFP8, compile
           the definition, which takes one line and is at least as fast as `fused`. For NVFP4, write
           the kernel. The page accepts no error: codes and scales must match the definition bit for
           bit. The formats themselves lose accuracy. MXFP8 rounds an element by up to 2^-4 of its
           value. The scale is a power of two, and values above 448 times the scale are clamped to
           448 times the scale. So the largest elements of a block lose up to 2^-3 of their value.
           NVFP4 rounds an element by up to a third of its value if the element is at least half the
           scale. Smaller elements become 0 or half the scale.
"""

import functools

import torch
import triton
import triton.language as tl

from pytest_aisp import Conditions, Cost, Variant, Work, compare
from suites.rounding import to_even

MX, NV = 32, 16  # elements of a block
E4M3, E2M1 = 448.0, 6.0  # the largest numbers
SIXTH = 1 / E2M1
"""One sixth, in fp32. A number of 5 bits times 6 times this constant rounds back to the same
number. So a value midway between two e4m3 numbers stays midway, as in the
reference, which divides."""
BIAS = 127  # bias of the exponents of fp32 and of MXFP8's scales
# The midpoints between e2m1's neighbors 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and whether a midpoint
# rounds up. A midpoint rounds to the neighbor whose code is even.
MIDDLES = ((0.25, False), (0.75, True), (1.25, False), (1.75, True))
MIDDLES += ((2.5, False), (3.5, True), (5.0, False))


def inputs(device, rows, k):
    # Each block of 16 has a size of its own, between 2^-4 and 2^3. Larger blocks would need a scale
    # for the whole tensor.
    size = torch.randint(-4, 4, (rows, k // NV, 1), device=device).float().exp2()
    x = torch.randn(rows, k // NV, NV, device=device) * size
    return (x.view(rows, k).bfloat16(),)


def nearest(x, numbers):
    """Return each element's nearest index in the ascending `numbers`; ties go to even indices."""
    above = torch.searchsorted(numbers, x).clamp(1, len(numbers) - 1)
    low, high = x - numbers[above - 1], numbers[above] - x
    up = (high < low) | ((high == low) & (above % 2 == 0))
    return torch.where(up, above, above - 1)


def codes_of_definition(x, numbers):
    """Return each element's code: the index of its number, with the sign in the bit above."""
    sign = (x.signbit()) * len(numbers)
    return (nearest(x.abs(), numbers) + sign).to(torch.uint8)


def floats(exponents, mantissas, bias, device):
    """Return the numbers of a small float format in float64, in the order of their codes."""
    code = torch.arange(exponents * mantissas, device=device, dtype=torch.float64)
    exponent, fraction = code.div(mantissas, rounding_mode="floor"), code % mantissas / mantissas
    normal = (1 + fraction) * (exponent - bias).exp2()
    return torch.where(exponent > 0, normal, fraction * 2.0 ** (1 - bias))


def reference(x):
    blocks = x.double().view(len(x), -1, MX)
    largest = blocks.abs().amax(dim=-1)
    # frexp, because log2 of a power of two is not exact on a GPU. Its fraction is below 1.
    exponent = torch.where(largest > 0, largest, 2.0**-BIAS).frexp().exponent.double() - 9
    exponent = exponent.clamp(min=-BIAS)
    numbers = floats(16, 8, 7, x.device)[:127]  # the last code is NaN
    scaled = blocks * (-exponent).exp2().unsqueeze(-1)
    near = nearest(scaled.abs(), numbers) + scaled.signbit() * 128
    return near.to(torch.uint8).view(x.shape), (exponent + BIAS).to(torch.uint8)


def reference_fp4(x):
    blocks = x.double().view(len(x), -1, NV)
    numbers = floats(16, 8, 7, x.device)[:127]
    scales = nearest(blocks.abs().amax(dim=-1) / E2M1, numbers)
    divisor = numbers[scales].clamp(min=2.0**-9).unsqueeze(-1)
    near = nearest((blocks / divisor).abs(), floats(4, 2, 1, x.device)) + blocks.signbit() * 8
    near = near.to(torch.uint8).view(x.shape)
    return near[:, ::2] | near[:, 1::2] << 4, scales.to(torch.uint8)


def mxfp8(x):
    blocks = x.float().view(len(x), -1, MX)
    largest = blocks.abs().amax(dim=-1)
    # The exponent of e4m3's largest number is 8. So the largest scaled element is below 512.
    exponent = ((largest.view(torch.int32) >> 23) - 8).clamp(min=0)
    scaled = blocks * ((2 * BIAS - exponent) << 23).view(torch.float32).unsqueeze(-1)
    codes = scaled.clamp(-E4M3, E4M3).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).view(x.shape), exponent.to(torch.uint8)


def nvfp4(x):
    blocks = x.float().view(len(x), -1, NV)
    scales = (blocks.abs().amax(dim=-1) * SIXTH).to(torch.float8_e4m3fn)
    size, scale = blocks.abs(), scales.float().clamp(min=2.0**-9).unsqueeze(-1)
    codes = (blocks.view(torch.int32) >> 28) & 8
    # These products are exact. A quotient would be rounded.
    for middle, up in MIDDLES:
        codes += (size >= middle * scale) if up else (size > middle * scale)
    codes = codes.to(torch.uint8).view(x.shape)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales.view(torch.uint8)


@functools.cache
def compiled_form(definition):
    return torch.compile(definition, dynamic=False)


def eager(x):
    return mxfp8(x)


def compiled(x):
    return compiled_form(mxfp8)(x)


def compiled_fp4(x):
    return compiled_form(nvfp4)(x)


@triton.jit
def mxfp8_kernel(x, codes, scales, blocks, BLOCKS: tl.constexpr):
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None].to(tl.int64) * 32 + tl.arange(0, 32)[None, :]
    here = block[:, None] < blocks
    values = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), axis=1)
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 8, 0)
    factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = values * factor[:, None]
    # Below 2^-6, e4m3's step is 2^-9. Adding a number with the same step rounds to that step.
    small = (scaled + 3 * 2.0**13) - 3 * 2.0**13
    rounded = tl.where(tl.abs(scaled) < 2.0**-6, small, to_even(scaled, DROPPED=20))
    rounded = tl.minimum(tl.maximum(rounded, -448.0), 448.0)
    code = rounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    # Restore the sign of zeros.
    code |= ((values.to(tl.int32, bitcast=True) >> 24) & 128).to(tl.uint8)
    tl.store(codes + at, code, mask=here)
    tl.store(scales + block, exponent.to(tl.uint8), mask=block < blocks)


@triton.jit
def e2m1(size, scale):
    code = (size > 0.25 * scale).to(tl.int32) + (size >= 0.75 * scale).to(tl.int32)
    code += (size > 1.25 * scale).to(tl.int32) + (size >= 1.75 * scale).to(tl.int32)
    code += (size > 2.5 * scale).to(tl.int32) + (size >= 3.5 * scale).to(tl.int32)
    return code + (size > 5.0 * scale).to(tl.int32)


@triton.jit
def nvfp4_kernel(x, codes, scales, blocks, BLOCKS: tl.constexpr):
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None].to(tl.int64) * 16 + tl.arange(0, 16)[None, :]
    here = block[:, None] < blocks
    values = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    # Divide, because a product with a sixth and the addition below would become one multiply-add.
    share = tl.div_rn(tl.max(tl.abs(values), axis=1), 6.0)
    small = (share + 3 * 2.0**13) - 3 * 2.0**13  # as in mxfp8_kernel
    share = tl.where(share < 2.0**-6, small, to_even(share, DROPPED=20))
    share = tl.minimum(share, 448.0)
    scale = tl.maximum(share, 2.0**-9)[:, None]
    code = e2m1(tl.abs(values), scale) + ((values.to(tl.int32, bitcast=True) >> 28) & 8)
    first, second = tl.split(tl.reshape(code, (BLOCKS, 8, 2)))
    pairs = block[:, None].to(tl.int64) * 8 + tl.arange(0, 8)[None, :]
    tl.store(codes + pairs, (first | second << 4).to(tl.uint8), mask=here)
    stored = share.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(scales + block, stored, mask=block < blocks)


def launch(kernel, x, codes, size, blocks_each):
    rows, k = x.shape
    if k % size:
        raise ValueError(f"rows of {k} elements; needs a multiple of {size}")
    codes = torch.empty(rows, codes, device=x.device, dtype=torch.uint8)
    scales = torch.empty(rows, k // size, device=x.device, dtype=torch.uint8)
    blocks = scales.numel()
    grid = (triton.cdiv(blocks, blocks_each),)
    kernel[grid](x, codes, scales, blocks, BLOCKS=blocks_each)
    return codes, scales


def fused(x):
    return launch(mxfp8_kernel, x, x.shape[1], MX, 64)


def fused_fp4(x):
    return launch(nvfp4_kernel, x, x.shape[1] // 2, NV, 128)


def passes(elements, *each):
    """Return the cost of kernels in sequence, from the bytes each reads and writes per element."""
    first, *others = [
        Cost(read=read * elements, write=write * elements, launches=1) for read, write in each
    ]
    return sum(others, start=first)


INSTRUCTIONS, INSTRUCTIONS_FP4 = 19, 35  # per element, counted in the code for sm90


def eager_cost(rows, k):
    # Convert to fp32, absolute value, largest of each block; later scale, clamp, round. Six kernels
    # in the middle have one element per block.
    largest = passes(rows * k, (2, 4), (4, 4), (4, 4 / MX))
    return largest + Cost(launches=6) + passes(rows * k, (4, 4), (4, 4), (4, 1))


def one_pass(rows, k, code, block, instructions):
    elements = rows * k
    return Cost(
        read=2 * elements,
        write=code * elements + elements / block,
        ops={"fp32": 2 * instructions * elements},
        launches=1,
    )


def mxfp8_cost(rows, k):
    return one_pass(rows, k, 1, MX, INSTRUCTIONS)


def nvfp4_cost(rows, k):
    return one_pass(rows, k, 0.5, NV, INSTRUCTIONS_FP4)


def compiled_fp4_cost(rows, k):
    # Inductor stores each code in a byte and packs the codes in a second kernel.
    packing = Cost(read=rows * k, write=0.5 * rows * k, launches=1)
    return one_pass(rows, k, 1, NV, INSTRUCTIONS_FP4) + packing


def work(rows, k, code, block):
    return Work(read=2 * rows * k, write=code * rows * k + rows * k / block)


SIZES = [{"rows": 8192, "k": 8192}]
CHECK_SIZES = [{"rows": 5, "k": 96}, {"rows": 33, "k": 2080}]


@compare(
    baseline=eager,
    optimized=[Variant(compiled, at_least={"sm90": 18}), Variant(fused, at_least={"sm90": 18})],
    inputs=inputs,
    reference=reference,
    sizes=SIZES,
    check_sizes=CHECK_SIZES,
    work=lambda rows, k: work(rows, k, 1, MX),
    bound="dram",
    costs={eager: eager_cost, compiled: mxfp8_cost, fused: mxfp8_cost},
    conditions=Conditions(needs="fp8"),
)
def test_block_formats(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()


@compare(
    baseline=compiled_fp4,
    optimized=[Variant(fused_fp4, at_least={"sm90": 2.25})],
    inputs=inputs,
    reference=reference_fp4,
    sizes=SIZES,
    check_sizes=CHECK_SIZES,
    work=lambda rows, k: work(rows, k, 0.5, NV),
    bound="issue",
    costs={compiled_fp4: compiled_fp4_cost, fused_fp4: nvfp4_cost},
    conditions=Conditions(needs="fp8"),
)
def test_block_formats_of_four_bits(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
