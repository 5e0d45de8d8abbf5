"""Block-scaled products: multiply codes and scales of MXFP8 and NVFP4 in Blackwell's tensor cores.

Problem    Compute y = x W^T in bf16, with x (m, k) and W (n, k). W is the page's state.
Baseline   bf16: `torch.nn.functional.linear`, which is cuBLASLt.
Optimized  Both variants quantize x in the call, with the kernels of block_formats_test.py. W is
           quantized once, before the timed part. One Triton kernel multiplies, with
           `tl.dot_scaled`.
           mxfp8: e4m3 codes, and one power-of-two scale for every 32 elements of a row.
           nvfp4: changes `mxfp8`. There are e2m1 codes, two per byte, and an e4m3 scale for every
           16 elements. The scale of the whole tensor is 1 here.
Bound      Tensor cores, at twice the rate of bf16 for mxfp8 and at four times that rate for nvfp4.
           Tensor cores also apply the scales. In fp8_blocks_test.py, CUDA cores apply them. The
           scales increase the bytes of mxfp8 by 1/32, and the bytes of nvfp4 by an eighth. x is
           quantized in one pass. For nvfp4, instructions limit this pass. According to the cost and
           a B200's data sheet, the pass takes almost half as long as the product.
Use when   You have a Blackwell GPU, and the layers tolerate four or eight bits. Other GPUs have no
           instruction for these products, and Triton first converts both operands to bf16. These
           conversions make the variants slower than `bf16`, so they are not timed on other GPUs.
           cuBLASLt has these products too, through `torch.nn.functional.scaled_mm`. cuBLASLt takes
           scales in the order in which tensor cores read them. Our kernel takes scales in plain
           order and reorders them during the load. We chose the tile size without a GPU. The
           library is probably faster, but this page does not compare the two. The page claims no
           speedup and is not recorded, because no Blackwell GPU was available. On other machines,
           Triton's interpreter checks the numerics, and the kernels are assembled for sm100, sm103
           and sm121. In Triton's PTX for these targets, products use `mxf8f6f4.block_scale` and
           `mxf4nvf4.block_scale`. The check accepts the error that rounding each operand by 2^-4
           (mxfp8) or 2^-2 (nvfp4) of its value would cause. Products and sums need no further
           tolerance: a product of two codes has few bits, and the sums are in fp32.
"""

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from pytest_aisp import Conditions, Cost, Variant, Work, compare
from suites.ch19.block_formats_test import MX, NV, fused, fused_fp4, mxfp8_cost, nvfp4_cost
from suites.rounding import to_even

TILE = {"M": 128, "N": 128, "K": 128}


@triton.jit
def decoded(codes, scales, ROWS: tl.constexpr, K: tl.constexpr):
    """Return e2m1 codes times their scales in fp32: the emulated operand of a product."""
    code = tl.reshape(tl.join(codes & 15, codes >> 4), (ROWS, K)).to(tl.int32)
    exponent, half = (code >> 1) & 3, (code & 1).to(tl.float32) * 0.5
    power = ((exponent + 126) << 23).to(tl.float32, bitcast=True)  # 2^(exponent - 1)
    size = tl.where(exponent > 0, (1.0 + half) * power, half)
    signed = tl.where(code > 7, -size, size)
    scale = tl.broadcast_to(scales.to(tl.float32)[:, :, None], (ROWS, K // 16, 16))
    return signed * tl.reshape(scale, (ROWS, K))


@triton.jit
def product_kernel(
    x, w, x_scales, w_scales, out, m, n, width, blocks,
    FORMAT: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, EMULATED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Multiply rows of `width` bytes of codes and `blocks` scales.

    Both numbers are arguments because Triton checks whether an argument is a multiple of 16. Triton
    would not check `k // 2`, and would then load four-bit codes without `cp.async`.
    """
    # Eight rows of tiles at a time reuse the L2.
    columns, index = tl.cdiv(n, N), tl.program_id(0)
    group, inside = index // (8 * columns), index % (8 * columns)
    height = min(tl.cdiv(m, M) - 8 * group, 8)
    rows = ((8 * group + inside % height) * M + tl.arange(0, M)).to(tl.int64)
    outputs = (inside // height * N + tl.arange(0, N)).to(tl.int64)
    left, right = rows[:, None] < m, outputs[:, None] < n
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, tl.cdiv(width, K // PACKED)):
        at = start * (K // PACKED) + tl.arange(0, K // PACKED)[None, :]
        block = start * (K // GROUP) + tl.arange(0, K // GROUP)[None, :]
        there, scaled = at < width, block < blocks
        a = tl.load(x + rows[:, None] * width + at, mask=left & there, other=0)
        b = tl.load(w + outputs[:, None] * width + at, mask=right & there, other=0)
        first = x_scales + rows[:, None] * blocks + block
        second = w_scales + outputs[:, None] * blocks + block
        a_scale = tl.load(first, mask=left & scaled, other=0.0)
        b_scale = tl.load(second, mask=right & scaled, other=0.0)
        if EMULATED:
            total += tl.dot(decoded(a, a_scale, M, K), decoded(b, b_scale, N, K).T)
        else:
            total = tl.dot_scaled(a, a_scale, FORMAT, b.T, b_scale, FORMAT, total)
    here = (rows[:, None] < m) & (outputs[None, :] < n)
    place = out + rows[:, None] * n + outputs[None, :]
    tl.store(place, to_even(total, DROPPED=16).to(tl.bfloat16), mask=here)


def state(device, m, n, k):
    return torch.randn(n, k, device=device, dtype=torch.bfloat16)


def inputs(device, m, n, k):
    return (torch.randn(m, k, device=device, dtype=torch.bfloat16),)


def reference(w, x):
    return x.double() @ w.double().t()


def bf16(w, x):
    return F.linear(x, w)


def multiplied(x, w, form, block):
    """Return the product of quantized x and W, each a pair of codes and scales."""
    (codes, scales), (w_codes, w_scales) = x, w
    packed = 2 if form == "e2m1" else 1
    (m, width), n = codes.shape, len(w_codes)
    out = torch.empty(m, n, device=codes.device, dtype=torch.bfloat16)
    if block == NV:
        scales, w_scales = (each.view(torch.float8_e4m3fn) for each in (scales, w_scales))
    grid = (triton.cdiv(m, TILE["M"]) * triton.cdiv(n, TILE["N"]),)
    product_kernel[grid](
        codes, w_codes, scales, w_scales, out, m, n, width, scales.shape[1],
        FORMAT=form, PACKED=packed, GROUP=block,
        # Triton 3.9's interpreter treats every scale as a power of two.
        EMULATED=block == NV and not out.is_cuda,
        **TILE, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def mxfp8(w, x):
    ready = fused(w)
    yield lambda: multiplied(fused(x), ready, "e4m3", MX)


def nvfp4(w, x):
    ready = fused_fp4(w)
    yield lambda: multiplied(fused_fp4(x), ready, "e2m1", NV)


def bf16_cost(m, n, k):
    return Cost(read=2 * (m + n) * k, write=2 * m * n, ops={"bf16": 2 * m * n * k}, launches=1)


def scaled_product(m, n, k, kind, code, block):
    return Cost(
        read=(m + n) * k * (code + 1 / block),
        write=2 * m * n,
        ops={kind: 2 * m * n * k},
        launches=1,
    )


@compare(
    baseline=bf16,
    optimized=[
        Variant(mxfp8, precision="mxfp8", at_least="yardstick"),
        Variant(nvfp4, precision="nvfp4", at_least="yardstick"),
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 8192, "n": 8192, "k": 8192}],
    # The tolerance for four bits is wide, so the check needs many elements to detect a stale
    # answer.
    check_sizes=[{"m": 35, "n": 200, "k": 384}, {"m": 9, "n": 130, "k": 224}],
    work=lambda m, n, k: Work(
        # The minimum traffic: x in bf16, and W in four bits. mxfp8 reads more.
        read=2 * m * k + n * k * (0.5 + 1 / NV),
        write=2 * m * n,
        flops={"nvfp4": 2 * m * n * k},
        terms=k,
    ),
    bound="tensor",
    costs={
        bf16: bf16_cost,
        mxfp8: lambda m, n, k: mxfp8_cost(m, k) + scaled_product(m, n, k, "mxfp8", 1, MX),
        nvfp4: lambda m, n, k: nvfp4_cost(m, k) + scaled_product(m, n, k, "nvfp4", 0.5, NV),
    },
    conditions=Conditions(needs="fp4"),
)
def test_scaled_products(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
