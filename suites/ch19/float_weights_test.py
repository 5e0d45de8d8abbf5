"""Small floats as weights: a decode step reads weights in 16, 8, 6 or 4 bits.

Problem    Compute y = x W^T, where x has few rows, as in a decode step. x (rows, k), W (n, k) and y
           are bf16. W is the page's state.
Baseline   bf16: `torch.nn.functional.linear`, which calls cuBLAS.
Optimized  All variants use one Triton kernel, which converts weights to bf16 in registers. x stays
           bf16. In fp8, fp6 and fp4, W is quantized once, before the timed part. Every 32 weights
           of a row share a scale, a power of two, as in the OCP's MX formats.
           streamed: changes `bf16`. The Triton kernel reads bf16 weights, so the variant shows the
           effect of the kernel without quantization.
           fp8: changes `streamed`. MXFP8: e4m3, one byte per weight.
           fp6: changes `fp8`. MXFP6: e2m3, four weights in three bytes. Each byte holds the code of
           one weight and two bits of the fourth code.
           fp4: changes `fp6`. MXFP4: e2m1, two weights in a byte.
Bound      DRAM limits `bf16`, `streamed` and `fp8`. The L2 of an H100 is too small for the weights
           of any side. Instructions limit fp6 and fp4. No GPU before Blackwell converts codes of
           six or four bits. So the kernel shifts the bits of a code to the place of fp32's exponent
           and mantissa, and multiplies by the scale. In nvdisasm's listing for sm90, the loop has 6
           instructions per weight for fp8, 11 for fp6 and 8 for fp4, with the autotuner's largest
           tile per warp. Smaller tiles take up to one more instruction per weight. So fp6 saves a
           quarter of fp8's memory but should take longer. A product always has 16 rows, so 1 row
           and 16 rows of x should take the same time.
Seen       On an H100, `streamed` takes as long as bf16 and as long as predicted. `fp8` takes a
           third longer than predicted, and `fp4` takes one and a half times as long as predicted.
           `fp6` takes almost twice as long as predicted and is slower than `bf16`. 1 row and 16
           rows take the same time, as expected. Loads and conversions probably overlap only in
           part. We did not profile the loop. On an H200, `bf16` gains from the faster DRAM, but
           `fp4` takes as long as on an H100, because instructions are its limit. So on an H200,
           `fp4` is slightly slower than `bf16`.
Use when   A product has few rows and large weights, as in a decode step. Use fp6 if memory is
           scarce and four bits lose too much accuracy. e2m3 has as many mantissa bits as e4m3, and
           the scale for every 32 weights makes up for its smaller range. int4 with a scale per 128
           weights takes fewer instructions than fp4 (`../ch13/weight_only_test.py`), but the
           numbers of int4 are evenly spaced. Weights must be below 2^63. The check accepts the
           error that rounding each operand by 2^-4 of its value (fp8, fp6), or each weight by 2^-2
           of its value (fp4), would cause. The page claims no speedup for fp6 and fp4: `fp4` gains
           on an H100 and loses on an H200.
"""

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare
from suites.ch19.block_formats_test import codes_of_definition, floats, mxfp8
from suites.rounding import to_even

ROWS = 16  # fewest rows of a tensor-core product
GROUP = 32  # weights that share a scale
STEP = 128  # weights of a row in one product
PARTS = {16: 1, 8: 1, 6: 4, 4: 2}  # parts of a row whose weights lie in the same bytes
MANTISSA = {6: 3, 4: 1}
LARGEST = {6: 7.5, 4: 6.0}
CONFIGS = [
    triton.Config({"N": n}, num_warps=warps, num_stages=stages)
    for n, warps, stages in ((64, 4, 4), (64, 8, 3), (32, 4, 3))
]


@triton.jit
def number(code, MANTISSA: tl.constexpr):
    """Return the number that a code of e2m3 or e2m1 stands for, times 2^-126.

    The code's bits become the last two bits of an fp32 exponent and the first bits of the mantissa.
    So a subnormal code becomes a subnormal number of fp32.
    """
    SIGN: tl.constexpr = 4 << MANTISSA
    bits = ((code & (SIGN - 1)) << (23 - MANTISSA)) | ((code & SIGN) << (29 - MANTISSA))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def with_part(
    total, weights, part, x, scales, row, column, at, rows, n, k,
    PART: tl.constexpr, N: tl.constexpr, PRODUCT: tl.constexpr, RAISED: tl.constexpr,
):  # fmt: skip
    """Add the product of one part of the rows of W, times 2^RAISED."""
    length = k // part
    inside = (row[:, None] < rows) & (at[None, :] < length)
    values = tl.load(x + row[:, None] * k + PART * length + at[None, :], mask=inside, other=0.0)
    group = tl.min(at, axis=0) // 32 + tl.arange(0, at.shape[0] // 32)
    here = (column[:, None] < n) & (group[None, :] < length // 32)
    place = scales + column[:, None] * (k // 32) + PART * (length // 32) + group[None, :]
    scale = tl.load(place, mask=here, other=127).to(tl.int32)
    scale = ((scale + RAISED) << 23).to(tl.float32, bitcast=True)
    wide = tl.broadcast_to(scale[:, :, None], (N, at.shape[0] // 32, 32))
    scaled = weights * tl.reshape(wide, (N, at.shape[0]))
    return tl.dot(values.to(PRODUCT), scaled.to(PRODUCT).T, total)


@triton.autotune(CONFIGS, key=["rows", "n", "k", "BITS"])
@triton.jit
def linear_kernel(
    x, w, scales, out, rows, n, k,
    BITS: tl.constexpr, PRODUCT: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    column = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)
    total = tl.zeros((ROWS, N), tl.float32)
    PARTS: tl.constexpr = 4 if BITS == 6 else (2 if BITS == 4 else 1)
    length = k // PARTS
    # A row of W is k weights of 16 bits, k bytes, k/2 bytes, or three planes of k/4 bytes.
    right = w + column[:, None] * (3 * length if BITS == 6 else length)
    for start in range(0, length, STEP):
        at = start + tl.arange(0, STEP)
        there = (column[:, None] < n) & (at[None, :] < length)
        first = tl.load(right + at[None, :], mask=there, other=0)
        if BITS == 16:
            inside = (row[:, None] < rows) & (at[None, :] < k)
            values = tl.load(x + row[:, None] * k + at[None, :], mask=inside, other=0.0)
            total = tl.dot(values.to(PRODUCT), first.to(PRODUCT).T, total)
        elif BITS == 8:
            weights = first.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            total = with_part(
                total, weights, PARTS, x, scales, row, column, at, rows, n, k, 0, N, PRODUCT, 0
            )
        elif BITS == 6:
            second = tl.load(right + length + at[None, :], mask=there, other=0).to(tl.int32)
            third = tl.load(right + 2 * length + at[None, :], mask=there, other=0).to(tl.int32)
            first = first.to(tl.int32)
            fourth = (first >> 6) | ((second >> 6) << 2) | ((third >> 6) << 4)
            codes = (first & 63, second & 63, third & 63, fourth)
            for part in tl.static_range(4):
                total = with_part(
                    total, number(codes[part], 3), PARTS, x, scales, row, column, at, rows, n, k,
                    part, N, PRODUCT, 63,
                )  # fmt: skip
        else:
            first = first.to(tl.int32)
            codes = (first & 15, first >> 4)
            for part in tl.static_range(2):
                total = with_part(
                    total, number(codes[part], 1), PARTS, x, scales, row, column, at, rows, n, k,
                    part, N, PRODUCT, 63,
                )  # fmt: skip
    if BITS < 8:
        total *= 9223372036854775808.0  # 2^63: the rest of the missing exponent
    place = out + row[:, None] * n + column[None, :]
    here = (row[:, None] < rows) & (column[None, :] < n)
    tl.store(place, to_even(total, DROPPED=16).to(tl.bfloat16), mask=here)


def state(device, rows, n, k):
    return torch.randn(n, k, device=device, dtype=torch.bfloat16)


def inputs(device, rows, n, k):
    return (torch.randn(rows, k, device=device, dtype=torch.bfloat16),)


def reference(w, x):
    return x.double() @ w.double().t()


def bf16(w, x):
    return F.linear(x, w)


def linear(x, w, scales, bits):
    (rows, k), n = x.shape, len(w)
    out = torch.empty(rows, n, device=x.device, dtype=x.dtype)
    # Triton 3.9's interpreter treats bf16 as integers. In fp32, the products are the same.
    product = tl.bfloat16 if x.is_cuda else tl.float32

    def grid(meta):
        return (triton.cdiv(n, meta["N"]),)

    linear_kernel[grid](
        x, w, scales, out, rows, n, k, BITS=bits, PRODUCT=product, ROWS=ROWS, STEP=STEP
    )
    return out


def quantized(w, bits):
    """Return W's codes in e2m3 or e2m1, one per byte, and a scale for every 32 codes."""
    blocks = w.float().view(len(w), -1, GROUP)
    # The exponent of the largest number is 2. So the largest element is below 8.
    exponent = ((blocks.abs().amax(dim=-1).view(torch.int32) >> 23) - 2).clamp(min=MANTISSA[bits])
    scaled = blocks * ((254 - exponent) << 23).view(torch.float32).unsqueeze(-1)
    numbers = floats(4, 1 << MANTISSA[bits], 1, w.device).float()
    codes = codes_of_definition(scaled.clamp(-LARGEST[bits], LARGEST[bits]), numbers)
    return codes.view(w.shape), exponent.to(torch.uint8)


def streamed(w, x):
    return linear(x, w, w, 16)


def fp8(w, x):
    codes, scales = mxfp8(w)
    yield lambda: linear(x, codes, scales, 8)


def fp6(w, x):
    codes, scales = quantized(w, 6)
    *others, fourth = codes.chunk(PARTS[6], dim=1)
    # The last shift drops the bits that do not fit in a byte.
    planes = [code | (fourth >> 2 * i & 3) << 6 for i, code in enumerate(others)]
    packed = torch.cat(planes, dim=1)
    yield lambda: linear(x, packed, scales, 6)


def fp4(w, x):
    codes, scales = quantized(w, 4)
    low, high = codes.chunk(PARTS[4], dim=1)
    packed = low | high << 4
    yield lambda: linear(x, packed, scales, 4)


def weight_bytes(n, k, bits):
    return n * k * bits / 8 + (n * k / GROUP if bits < 16 else 0)


def product(rows, n, k, bits, instructions=0):
    """Return the cost of one product. Each instruction counts as one fp32 multiply-add."""
    return Cost(
        read=weight_bytes(n, k, bits) + 2 * rows * k,
        write=2 * rows * n,
        ops={"bf16": 2 * ROWS * n * k, "fp32": 2 * instructions * n * k},
        launches=1,
    )


@compare(
    baseline=bf16,
    optimized=[
        Variant(streamed, at_least="yardstick"),
        Variant(fp8, precision="mxfp8", at_least="yardstick", needs="fp8"),
        # With four stages, `fp6` needs more shared memory than a block has on sm121.
        Variant(fp6, precision="mxfp8", needs="shared_227k", at_least="yardstick"),
        Variant(fp4, precision="w4a16", at_least="yardstick"),
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": rows, "n": 28672, "k": 8192} for rows in (1, 16)],
    # The tolerance for four bits is wide, so the check needs many elements to detect a stale
    # answer.
    check_sizes=[{"rows": 7, "n": 150, "k": 640}, {"rows": 3, "n": 256, "k": 384}],
    work=lambda rows, n, k: Work(
        read=weight_bytes(n, k, 4) + 2 * rows * k, write=2 * rows * n, terms=k
    ),
    bound="dram",
    costs={
        bf16: lambda rows, n, k: product(rows, n, k, 16),
        streamed: lambda rows, n, k: product(rows, n, k, 16),
        fp8: lambda rows, n, k: product(rows, n, k, 8, instructions=6),
        fp6: lambda rows, n, k: product(rows, n, k, 6, instructions=11),
        fp4: lambda rows, n, k: product(rows, n, k, 4, instructions=8),
    },
)
def test_float_weights(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
