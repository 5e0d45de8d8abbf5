"""Weight-only quantization: a decode step reads weights, so make them smaller.

Problem    y = x W^T for the few rows of a decode step, x (rows, k) and W (n, k) in bf16, y in bf16.
           The weights are the page's state.
Baseline   bf16: `torch.nn.functional.linear`, that is cuBLAS.
Optimized  By one Triton kernel, which brings the weights to bf16 in registers; they are quantized
           once, before what is timed. x stays bf16.
           streamed: bf16 weights, so that the kernel's part is not taken for that of the bytes.
           int8: a byte a weight, and a scale for each row of W.
           int4: half a byte a weight, and a bf16 scale for each 128 along a row.
Bound      DRAM: the weights, 2, 1 and 0.52 bytes each. At n, k = 28672, 8192 they are 470 MB, 235
           and 121, none of which the L2 holds: 107 us, 53 and 28 at 4.4 TB/s; x and y are below
           1.5 MB. streamed 1.0x, int8 2x and int4 3.9x at most. To read at that rate int4 must
           convert 38 weights a cycle and processor, which converts 64, and move them to the tensor
           cores: rather 2.5x to 3x. For these the rows are 16, however many they are; but each
           block reads all rows of x from the L2, with 16 rows and 64 columns a block 117 MB: int8
           1.8x there and int4 2x. No GPU has measured this page yet.
"""

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from pytest_aisp import Variant, Work, compare

from .rounding import to_even

ROWS = 16  # of the tensor cores' smallest product
GROUP = 128

CONFIGS = [
    triton.Config({"N": n}, num_warps=warps, num_stages=stages)
    for n, warps, stages in ((32, 4, 4), (64, 4, 5))
]
tuned = triton.autotune(CONFIGS, key=["rows", "n", "k", "BITS"])


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
        # A byte holds a weight of the first half of a row and one of the second.
        half, groups = k // 2, k // GROUP
        right = w + column[None, :].to(tl.int64) * half + inside[:, None]
        for start in range(0, half, GROUP):
            packed = tl.load(right + start, mask=there, other=0)
            low = tl.load(left + start, mask=here, other=0.0).to(PRODUCT)
            high = tl.load(left + half + start, mask=here, other=0.0).to(PRODUCT)
            at = scales + column * groups + start // GROUP
            first = tl.load(at, mask=column < n, other=0.0).to(tl.float32)
            second = tl.load(at + groups // 2, mask=column < n, other=0.0).to(tl.float32)
            total += tl.dot(low, ((packed << 4) >> 4).to(PRODUCT)) * first[None, :]
            total += tl.dot(high, (packed >> 4).to(PRODUCT)) * second[None, :]
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
    # Triton 3.9's interpreter multiplies the bits of bf16; of fp32 it computes the same products.
    product = tl.bfloat16 if x.is_cuda else tl.float32

    def grid(meta):
        return (triton.cdiv(n, meta["N"]),)

    linear_kernel[grid](
        x, w, scales, out, rows, n, k, BITS=bits, PRODUCT=product, ROWS=ROWS, GROUP=GROUP
    )
    return out


def streamed(w, x):
    return linear(x, w, w, 16)


def rounded(w, most):
    """Return each last dimension of `w` as integers up to `most`, and its scale in bf16."""
    scales = (w.abs().amax(dim=-1, keepdim=True) / most).clamp(min=1e-12)
    return (w / scales.float()).round().clamp(-most, most).to(torch.int8), scales


def int8(w, x):
    quantized, scales = rounded(w, 127)
    yield lambda: linear(x, quantized, scales, 8)


def int4(w, x):
    groups, scales = rounded(w.view(len(w), -1, GROUP), 7)
    low, high = groups.view(w.shape).chunk(2, dim=1)
    packed = (high << 4) | (low & 15)
    yield lambda: linear(x, packed, scales, 4)


@compare(
    baseline=bf16,
    optimized=[
        Variant(streamed, at_least="yardstick"),
        Variant(int8, precision="int8"),
        Variant(int4, precision="w4a16"),
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": rows, "n": 28672, "k": 8192} for rows in (1, 16)],
    # A single row of few columns could not tell a stale answer by the wide bound of four bits.
    check_sizes=[{"rows": 5, "n": 33, "k": 768}, {"rows": 3, "n": 72, "k": 512}],
    # The bytes of int4: what the other sides read more is what they lose.
    work=lambda rows, n, k: Work(
        read=n * k / 2 + 2 * n * k / GROUP + 2 * rows * k, write=2 * rows * n, terms=k
    ),
    bound="dram",
)
def test_weight_only(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
