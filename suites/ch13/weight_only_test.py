"""Weight-only quantization: a decode step mostly reads weights, so make the weights smaller.

Problem    Compute y = x W^T with few rows in x, as in a decode step. x (rows, k), W (n, k) and y
           are bf16. W is the page's state.
Baseline   bf16: `torch.nn.functional.linear`, which calls cuBLAS.
Optimized  All variants except `library` use one Triton kernel, which converts the weights to bf16
           in registers. The weights are quantized once, before the timed part. x stays bf16.
           streamed: changes `bf16`. The Triton kernel reads bf16 weights, so the variant shows the
           effect of the kernel without smaller weights.
           int8: changes `streamed`. Weights have one byte each, and each row of W has one scale.
           int4: changes `int8`. Weights have half a byte each, and every 128 weights of a row have
           one fp32 scale.
           library: changes `int4`. PyTorch's own kernel, `_weight_int4pack_mm`, multiplies the same
           weights.
Bound      DRAM limits bf16 and `streamed`, at 2 bytes per weight. The weights do not fit in any L2.
           DRAM and instructions limit int8 about equally, and instructions limit int4 and
           `library`. Per weight, the main loop of int8 and int4 issues 5 instructions, and the loop
           of library almost 6. We counted with nvdisasm for sm90. For library, we compiled the
           kernel from PyTorch's source with nvcc 13.0. So `int4` is barely faster than `int8`,
           although it reads about half of the bytes. A third of the instructions of `library`
           convert weights. The others load x, multiply and add. Both kernels always multiply 16
           rows, so the predictions for 1 row and for 16 rows are nearly equal.
Seen       On an H200, `int8` takes about a quarter longer than its memory traffic alone. Loads and
           conversions take about the same time, and probably overlap only in part. With 1 row,
           `library` is about as fast as int4, as predicted. With 16 rows, `library` takes almost
           five times as long as predicted, and is slower than `bf16`. PyTorch's source shows a
           probable cause: each block of that kernel computes 8 columns of y, and reads all of x in
           loads of 4 bytes. With 16 rows, the blocks together read more than seven times as many
           bytes of x as of weights. We did not measure how much time these reads take. The
           preparation of `library` keeps 1.3 GiB. Most of that is one int32 per weight, which the
           timed part does not use. The packed weights and their scales are less than a tenth.
Use when   A few rows are multiplied with large weights, as in a decode step. PyTorch's own kernel
           suits 1 row, but not 16. With many rows, the matrix products take most of the time, and
           converting the weights is extra work. In that case, use 8-bit matrix products
           (fp8_linear_test.py).
"""

import functools

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare

from .rounding import to_even

ROWS = 16  # rows of the smallest tensor core product
GROUP = 128  # weights per scale of int4
INNER_TILES = 8  # parameter of the library's packed format; 8 allows loads of 16 bytes

CONFIGS = [
    triton.Config({"N": n}, num_warps=warps, num_stages=stages)
    for n, warps, stages in ((32, 4, 3), (64, 4, 5), (64, 2, 3))
]
tuned = triton.autotune(CONFIGS, key=["rows", "n", "k", "BITS"])

# PTX that converts four bytes, each holding two 4-bit weights, to eight bf16 weights. For a byte u
# below 16, the PTX puts 0x43 in front of u, which gives the bf16 number 128 + u, and subtracts 136,
# because a weight is stored as u = weight + 8. Outputs: two pairs of lower halves, two pairs of
# upper halves.
HALVES = tl.constexpr("""{
.reg .b32 upper, excess;
mov.b32 excess, 0x43084308;
shr.u32 upper, $4, 4;
prmt.b32 $0, $4, 0x43434343, 0x4140;
prmt.b32 $1, $4, 0x43434343, 0x4342;
prmt.b32 $2, upper, 0x43434343, 0x4140;
prmt.b32 $3, upper, 0x43434343, 0x4342;
and.b32 $0, $0, 0xff0fff0f;
and.b32 $1, $1, 0xff0fff0f;
and.b32 $2, $2, 0xff0fff0f;
and.b32 $3, $3, 0xff0fff0f;
sub.rn.bf16x2 $0, $0, excess;
sub.rn.bf16x2 $1, $1, excess;
sub.rn.bf16x2 $2, $2, excess;
sub.rn.bf16x2 $3, $3, excess;
}""")


@triton.jit
def halves(packed, PRODUCT: tl.constexpr):
    """Return the lower and the upper 4 bits of each byte, minus 8, as two tensors of PRODUCT."""
    if tl.bfloat16 == PRODUCT:
        return tl.inline_asm_elementwise(
            HALVES, "=r,=r,=r,=r,r", [packed], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        return (packed & 15).to(PRODUCT) - 8, (packed >> 4).to(PRODUCT) - 8


@tuned
@triton.jit
def linear_kernel(
    x,
    w,
    scales,
    out,
    rows,
    n,
    k,
    BITS: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    N: tl.constexpr,
):
    row, inside = tl.arange(0, ROWS), tl.arange(0, GROUP)
    column = tl.program_id(0) * N + tl.arange(0, N)
    here, there = row[:, None] < rows, column[None, :] < n
    left = x + row[:, None] * k + inside[None, :]
    total = tl.zeros((ROWS, N), tl.float32)
    if BITS == 4:
        # A byte holds one weight from the first half of a row and one from the second half. Triton
        # does not prefetch scales, because they are not used in tl.dot. So load them a step ahead.
        half = k // 2
        steps = half // GROUP
        right = w + column[None, :].to(tl.int64) * half + inside[:, None]
        lower, upper = scales + column, scales + steps * n + column
        first = tl.load(lower, mask=column < n, other=0.0)
        second = tl.load(upper, mask=column < n, other=0.0)
        for step in range(steps):
            packed = tl.load(right + step * GROUP, mask=there, other=0)
            low = tl.load(left + step * GROUP, mask=here, other=0.0).to(PRODUCT)
            high = tl.load(left + half + step * GROUP, mask=here, other=0.0).to(PRODUCT)
            ahead = tl.minimum(step + 1, steps - 1) * n
            first_ahead = tl.load(lower + ahead, mask=column < n, other=0.0)
            second_ahead = tl.load(upper + ahead, mask=column < n, other=0.0)
            low_weights, high_weights = halves(packed, PRODUCT)
            total += tl.dot(low, low_weights) * first[None, :]
            total += tl.dot(high, high_weights) * second[None, :]
            first, second = first_ahead, second_ahead
    else:
        right = w + column[None, :].to(tl.int64) * k + inside[:, None]
        for start in range(0, k, GROUP):
            weights = tl.load(right + start, mask=there, other=0).to(PRODUCT)
            values = tl.load(left + start, mask=here, other=0.0).to(PRODUCT)
            total = tl.dot(values, weights, total)
        if BITS == 8:
            total *= tl.load(scales + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    result = to_even(total, DROPPED=16).to(tl.bfloat16)
    tl.store(out + row[:, None] * n + column[None, :], result, mask=here & there)


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
    # Triton 3.9's interpreter multiplies bf16 as if its bits were integers, so use fp32 there.
    product = tl.bfloat16 if x.is_cuda else tl.float32

    def grid(meta):
        return (triton.cdiv(n, meta["N"]),)

    linear_kernel[grid](
        x,
        w,
        scales,
        out,
        rows,
        n,
        k,
        BITS=bits,
        PRODUCT=product,
        ROWS=ROWS,
        GROUP=GROUP,
    )
    return out


def streamed(w, x):
    return linear(x, w, w, 16)


def rounded(w, most):
    """Quantize along the last dimension of `w`. Return integers up to `most`, and bf16 scales."""
    scales = (w.abs().amax(dim=-1, keepdim=True) / most).clamp(min=1e-12)
    return (w / scales.float()).round().clamp(-most, most).to(torch.int8), scales


def int8(w, x):
    quantized, scales = rounded(w, 127)
    yield lambda: linear(x, quantized, scales, 8)


def int4(w, x):
    groups, scales = rounded(w.view(len(w), -1, GROUP), 7)
    low, high = (groups.view(w.shape) + 8).view(torch.uint8).chunk(2, dim=1)
    packed, by_group = (high << 4) | low, scales.squeeze(-1).t().float().contiguous()
    yield lambda: linear(x, packed, by_group, 4)


def library(w, x):
    groups, scales = rounded(w.view(len(w), -1, GROUP), 7)
    values = groups.view(w.shape).int() + 8
    scales = scales.squeeze(-1).t()
    scales_and_zeros = torch.stack([scales, torch.zeros_like(scales)], dim=-1).contiguous()
    ops = torch.ops.aten
    if w.is_cuda:
        pairs = (values[:, ::2] << 4 | values[:, 1::2]).to(torch.uint8)
        packed = ops._convert_weight_to_int4pack(pairs, INNER_TILES)
        product = ops._weight_int4pack_mm
    else:
        packed = ops._convert_weight_to_int4pack_for_cpu(values, INNER_TILES)
        product = ops._weight_int4pack_mm_for_cpu
    yield lambda: product(x, packed, GROUP, scales_and_zeros)


def multiplied(rows, n, k, weights, instructions=0):
    """Return the cost of one matrix product.

    Args:
        rows, n, k: the size.
        weights: bytes of the weights and of their scales.
        instructions: how many the kernel's main loop issues per weight. An instruction takes the
            slot of an fp32 multiply-add, which counts as 2 operations.
    """
    return Cost(
        read=weights + 2 * rows * k,
        write=2 * rows * n,
        ops={"bf16": 2 * max(rows, ROWS) * n * k, "fp32": 2 * instructions * n * k},
        launches=1,
    )


def full_weights(rows, n, k):
    return multiplied(rows, n, k, 2 * n * k)


def four_bits(n, k):
    """Return the bytes of the int4 weights and of their scales (4 bytes per group)."""
    return n * k / 2 + 4 * n * k / GROUP


def work(rows, n, k):
    # Bytes with int4 weights. The other sides read more.
    return Work(read=four_bits(n, k) + 2 * rows * k, write=2 * rows * n, terms=k)


against_bf16 = functools.partial(
    compare,
    baseline=bf16,
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": rows, "n": 28672, "k": 8192} for rows in (1, 16)],
    work=work,
    bound="dram",
)


@against_bf16(
    optimized=[
        Variant(streamed, at_least="yardstick"),
        Variant(int8, precision="int8", at_least={"sm90": 1.5}),
        Variant(int4, precision="w4a16", at_least={"sm90": 1.6}),
    ],
    # The 4-bit tolerance is wide, so a stale result is only detected if there are many elements.
    check_sizes=[{"rows": 5, "n": 289, "k": 768}, {"rows": 3, "n": 520, "k": 512}],
    costs={
        bf16: full_weights,
        streamed: full_weights,
        int8: lambda rows, n, k: multiplied(rows, n, k, n * k + 2 * n, instructions=5),
        int4: lambda rows, n, k: multiplied(rows, n, k, four_bits(n, k), instructions=5),
    },
)
def test_weight_only(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@against_bf16(
    optimized=[Variant(library, precision="w4a16", at_least="yardstick")],
    check_sizes=[{"rows": 3, "n": 528, "k": 512}],  # on a CPU, n must be a multiple of 16
    costs={
        bf16: full_weights,
        # The loop of the library's kernel has 180 instructions. A thread converts 32 weights in it.
        library: lambda rows, n, k: multiplied(rows, n, k, four_bits(n, k), instructions=180 / 32),
    },
)
def test_weight_only_in_the_library(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
