"""Dynamic int8: a product at twice the rate pays only if quantizing it is fused.

Problem    y = x W^T, x (m, k) and W (n, k) in bf16, y in bf16. The weights are the page's state.
Baseline   bf16: `torch.nn.functional.linear`, that is cuBLASLt.
Optimized  int8 weights, a scale a row, quantized once before what is timed; int8 activations, a
           scale a row, quantized in every call; `torch._int_mm`, rescaled in fp32.
           eager: as PyTorch says it, an operation a kernel.
           compiled: the same function through `torch.compile`, which quantizes in one kernel and
           rescales in one. Compiled before it is timed.
           torchao: its own int8 linear layer, compiled; optional, without it the case says how to
           install it.
Bound      Tensor cores: 2 m n k operations, 750 TFLOP/s in bf16 and about 1500 in int8, if cuBLASLt
           reaches that: 2x at most. The product writes 4 bytes for each of y. eager moves 25 more
           for each of x (its size, the maximum, scaled in fp32, rounded, cut to int8) and 22 for
           each of y (scaled in fp32 twice, rounded to bf16). compiled reads x, again from the cache
           and writes a byte, and reads 4 bytes of y and writes 2. At m = n = k = 8192 bf16 takes
           1.47 ms, int8's product 0.73; eager moves 3.2 GB, 0.75 ms at 4.24 TB/s, 1.0x; compiled
           0.6 to 0.7 GB, 0.15 ms, 1.65x. With n = k = 4096 a quarter of the product stands against
           half of the bytes: 0.37 ms, eager 0.18 + 0.37, a loss to 0.65x; compiled 0.18 + 0.08,
           1.4x.
Seen       An H200: no gain. compiled 0.81x at n = k = 4096 and 0.97x at 8192, torchao 0.79x and
           0.94x, eager 0.35x and 0.53x. For int8 cuBLAS takes a kernel made for Ampere
           (`cutlass_80_tensorop_i16832gemm`) and reaches no more operations a second than its bf16
           kernel for Hopper, so that the 2x is not there to be gained.
"""

import functools
import importlib.util

import pytest
import torch
from torch.nn import functional as F

from pytest_aisp import Variant, Work, compare

LARGEST = 127
INSTALLED = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao: pip install torchao"
)


def state(device, m, n, k):
    return torch.randn(n, k, device=device, dtype=torch.bfloat16)


def inputs(device, m, n, k):
    return (torch.randn(m, k, device=device, dtype=torch.bfloat16),)


def reference(w, x):
    return x.double() @ w.double().t()


def bf16(w, x):
    return F.linear(x, w)


def quantized(x):
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (x / scale).round().to(torch.int8), scale


def product(x, w, w_scale):
    rows, x_scale = quantized(x)
    return (torch._int_mm(rows, w.t()) * x_scale * w_scale.t()).to(x.dtype)


@functools.cache
def compiled_product():
    return torch.compile(product, dynamic=False)  # a kernel for each size


def eager(w, x):
    ready = quantized(w)
    yield lambda: product(x, *ready)


def compiled(w, x):
    ready = quantized(w)
    yield lambda: compiled_product()(x, *ready)


def torchao(w, x):
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    n, k = w.shape
    layer = torch.nn.Linear(k, n, bias=False, device=w.device, dtype=w.dtype)
    with torch.no_grad():
        layer.weight.copy_(w)
    quantize_(layer, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
    ready = torch.compile(layer, dynamic=False)

    def run():
        with torch.no_grad():
            return ready(x)

    yield run


@compare(
    baseline=bf16,
    optimized=[
        Variant(eager, precision="int8", at_least="yardstick"),
        Variant(compiled, precision="int8", at_least={"sm90": "yardstick"}),
        Variant(torchao, precision="int8", at_least="yardstick", marks=[INSTALLED]),
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 8192, "n": 4096, "k": 4096}, {"m": 8192, "n": 8192, "k": 8192}],
    # `_int_mm` wants more than 16 rows, and n and k in multiples of 8.
    check_sizes=[{"m": 33, "n": 40, "k": 1032}],
    work=lambda m, n, k: Work(
        read=2 * (m * k + n * k), write=2 * m * n, flops={"int8": 2 * m * n * k}, terms=k
    ),
    bound="tensor",
)
def test_dynamic_int8(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
