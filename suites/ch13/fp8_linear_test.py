"""FP8 linear: the tensor cores are twice as fast, but quantizing takes time.

Problem    Compute y = x W^T in bf16, with x (m, k) and W (n, k). The weights are the page's state.
Baseline   bf16: `torch.nn.functional.linear`, which is cuBLASLt.
Optimized  All variants multiply in e4m3 by `torch._scaled_mm`.
           dynamic: changes `bf16`. x and W have one scale each, computed in each call from the
           largest element.
           rowwise: changes `dynamic`. Each row of x and of W has its own scale.
           prepared: changes `rowwise`. The weights are quantized once, before the timed part, as
           for inference.
           fused: changes `prepared`. One Triton kernel quantizes the rows of x and reads them only
           once. One pass is enough, because the scale of a row depends only on that row.
Bound      Tensor cores limit `fused`. The other variants add eager kernels, which DRAM limits.
           `dynamic` moves 13 bytes per quantized element, because the absolute values and the
           scaled values are written and read again. `rowwise` and `prepared` move 17 bytes, because
           multiplying by a tensor of fp32 scales returns fp32 values. A single fp32 scale leaves
           the values bf16. `fused` moves 3 bytes.
Seen       `dynamic`, `rowwise` and `prepared` quantize in eager mode, and are slower than
           predicted. The difference between `rowwise` and `prepared` is the time to quantize W.
           Quantizing W takes about twice as long as its memory traffic should take. We cannot
           explain this.
Use when   The weights can be quantized in advance, and one kernel can quantize the activations.
           Eager quantization in each call can take more time than the FP8 product saves. A scale
           for each row improves accuracy if the rows differ in magnitude.
"""

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from pytest_aisp import Conditions, Cost, Variant, Work, compare

from .rounding import to_even

LARGEST = 448.0  # the largest e4m3 number
ROWS = "_scaled_mm with a scale a row before torch 2.13" if torch.__version__ < (2, 13) else ""
"""Operations that a CPU does not support in this version of torch. Empty if there are none."""


def state(device, m, n, k):
    return torch.randn(n, k, device=device, dtype=torch.bfloat16)


def inputs(device, m, n, k):
    return (torch.randn(m, k, device=device, dtype=torch.bfloat16),)


def reference(w, x):
    return x.double() @ w.double().t()


def bf16(w, x):
    return F.linear(x, w)


def quantized(x, largest):
    scale = largest.float().clamp(min=1e-12) / LARGEST
    return (x * scale.reciprocal()).to(torch.float8_e4m3fn), scale


def tensorwise(x):
    return quantized(x, x.abs().amax())


def by_rows(x):
    return quantized(x, x.abs().amax(dim=1, keepdim=True))


def product(x, x_scale, w, w_scale):
    return torch._scaled_mm(
        x, w.t(), x_scale, w_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )


def dynamic(w, x):
    return product(*tensorwise(x), *tensorwise(w))


def rowwise(w, x):
    return product(*by_rows(x), *by_rows(w))


def prepared(w, x):
    ready = by_rows(w)
    yield lambda: product(*by_rows(x), *ready)


@triton.jit
def by_rows_kernel(x, out, scales, k, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + row.to(tl.int64) * k + at, mask=at < k, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value)), 1e-12) / LARGEST
    rounded = to_even(value / scale, DROPPED=20).to(tl.float8e4nv)
    tl.store(out + row.to(tl.int64) * k + at, rounded, mask=at < k)
    tl.store(scales + row, scale)


def by_rows_at_once(x):
    rows, k = x.shape
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, 1, device=x.device)
    block = triton.next_power_of_2(k)
    by_rows_kernel[(rows,)](x, out, scales, k, LARGEST=LARGEST, BLOCK=block, num_warps=8)
    return out, scales


def fused(w, x):
    ready = by_rows(w)
    yield lambda: product(*by_rows_at_once(x), *ready)


def bf16_product(m, n, k):
    return Cost(read=2 * (m + n) * k, write=2 * m * n, ops={"bf16": 2 * m * n * k}, launches=1)


def fp8_product(m, n, k):
    return Cost(read=(m + n) * k, write=2 * m * n, ops={"fp8": 2 * m * n * k}, launches=1)


def quantizing(elements, scaled):
    """Return the cost of quantizing in eager mode, with `scaled` bytes per scaled value."""
    magnitude = Cost(read=2 * elements, write=2 * elements, launches=1)
    largest = Cost(read=2 * elements, launches=1)
    scale = Cost(launches=4)  # cast to fp32, clamp, divide, reciprocal
    product = Cost(read=2 * elements, write=scaled * elements, launches=1)
    rounded = Cost(read=scaled * elements, write=elements, launches=1)
    return magnitude + largest + scale + product + rounded


def dynamic_cost(m, n, k):
    return quantizing(m * k, scaled=2) + quantizing(n * k, scaled=2) + fp8_product(m, n, k)


def prepared_cost(m, n, k):
    return quantizing(m * k, scaled=4) + fp8_product(m, n, k)


def fused_cost(m, n, k):
    return Cost(read=2 * m * k, write=m * k, launches=1) + fp8_product(m, n, k)


@compare(
    baseline=bf16,
    optimized=[
        Variant(dynamic, precision="fp8", at_least="yardstick"),
        Variant(rowwise, gpu_only=ROWS, precision="fp8", at_least="yardstick"),
        Variant(prepared, gpu_only=ROWS, precision="fp8", at_least={"sm90": "yardstick"}),
        Variant(fused, gpu_only=ROWS, precision="fp8", at_least={"sm90": 1.5}),
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 8192, "n": 4096, "k": 4096}, {"m": 8192, "n": 8192, "k": 8192}],
    # `_scaled_mm` needs multiples of 16 for k and n.
    check_sizes=[{"m": 33, "n": 48, "k": 80}, {"m": 7, "n": 16, "k": 1040}],
    work=lambda m, n, k: Work(
        read=2 * (m * k + n * k), write=2 * m * n, flops={"fp8": 2 * m * n * k}, terms=k
    ),
    bound="tensor",
    costs={
        bf16: bf16_product,
        dynamic: dynamic_cost,
        rowwise: lambda m, n, k: quantizing(n * k, scaled=4) + prepared_cost(m, n, k),
        prepared: prepared_cost,
        fused: fused_cost,
    },
    conditions=Conditions(needs="fp8"),
)
def test_fp8_linear(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
