"""FP8 with an inner dimension that it does not take: pad it with zeros.

Problem    y = x W^T, x (m, k) and W (n, k) in bf16, y in bf16, k no multiple of 16, of which FP8
           products are made. The weights are the page's state.
Baseline   as_is: `torch.nn.functional.linear` in bf16, which takes any k.
Optimized  Each on top of the one before.
           padded: zeros are appended to the rows of x and of W in every call, still in bf16.
           fp8: x and W are quantized to e4m3, a scale each, and padded as FP8, of half the bytes,
           in every call; `torch._scaled_mm`.
           prepared: the weights are quantized and padded once, before what is timed.
Bound      Tensor cores: at m, n, k = 8192, 8192, 4100 the product takes 0.73 ms in bf16 at 750
           TFLOP/s and 0.42 in FP8 at 1320. But rows of 8200 bytes begin at multiples of 8 and not
           of 16 bytes, which the tensor memory accelerator cannot fetch: kernels for such rows
           reach about 60 % (suites/ch10/gemm_test.py, `mma_sync` against `wgmma`), 1.2 ms.
           padded then pays 0.03 ms for x and for W and has whole rows, 0.8 ms, 1.5x. fp8 pays 13
           bytes an element to quantize (suites/ch13/fp8_linear_test.py) and 2 to pad, 0.12 ms for
           each of x and W: 0.66 ms, 1.8x; prepared 0.54 ms, 2.3x. A library that fetches such rows
           at full rate would leave 0.9x, 1.1x and 1.35x.
Seen       An H200: as_is takes 2.1 to 2.3 ms, 260 TFLOP/s, worse than predicted. padded 2.5x, fp8
           2.1x, prepared 3.1x: padding alone, in bf16, is worth most; quantizing in eager mode
           costs more than the product gains, until the weights are ready.
"""

import torch
from torch.nn import functional as F

from pytest_aisp import Conditions, Variant, Work, compare

LARGEST = 448.0  # of e4m3
GRAIN = 16


def state(device, m, n, k):
    return torch.randn(n, k, device=device, dtype=torch.bfloat16)


def inputs(device, m, n, k):
    return (torch.randn(m, k, device=device, dtype=torch.bfloat16),)


def reference(w, x):
    return x.double() @ w.double().t()


def as_is(w, x):
    return F.linear(x, w)


def whole_rows(x):
    return F.pad(x, (0, -x.shape[1] % GRAIN))


def padded(w, x):
    return F.linear(whole_rows(x), whole_rows(w))


def quantized(x):
    scale = x.abs().amax().float().clamp(min=1e-12) / LARGEST
    return whole_rows((x * scale.reciprocal()).to(torch.float8_e4m3fn)), scale


def product(x, x_scale, w, w_scale):
    return torch._scaled_mm(
        x, w.t(), x_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def fp8(w, x):
    return product(*quantized(x), *quantized(w))


def prepared(w, x):
    ready = quantized(w)
    yield lambda: product(*quantized(x), *ready)


@compare(
    baseline=as_is,
    optimized=[
        Variant(padded, at_least={"sm90": 2.0}),
        Variant(fp8, precision="fp8", at_least={"sm90": 1.8}),
        Variant(prepared, precision="fp8", at_least={"sm90": 2.6}),
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 8192, "n": 8192, "k": 4100}],
    # FP8 wants n in multiples of 16, too.
    check_sizes=[{"m": 33, "n": 48, "k": 77}, {"m": 7, "n": 16, "k": 1028}],
    work=lambda m, n, k: Work(
        read=2 * (m * k + n * k), write=2 * m * n, flops={"fp8": 2 * m * n * k}, terms=k
    ),
    bound="tensor",
    conditions=Conditions(needs="fp8"),
)
def test_fp8_padding(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
