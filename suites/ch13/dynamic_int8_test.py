"""Dynamic int8: a matrix product at twice the rate helps only if the quantization is fused.

Problem    Compute y = x W^T in bf16, with x (m, k) and W (n, k). The weights are the page's state.
Baseline   bf16: `torch.nn.functional.linear`, which is cuBLASLt.
Optimized  All variants use int8 weights with a scale for each row. The weights are quantized once,
           before the timed part. The activations are quantized in each call, also with a scale for
           each row. `torch._int_mm` multiplies, and the result is rescaled in fp32.
           eager: runs one kernel for each PyTorch operation.
           compiled: changes `eager`. After `torch.compile`, one kernel quantizes, and another
           rescales.
           torchao: the int8 linear layer of `torchao`, compiled. If `torchao` is not installed, the
           test is skipped and says how to install it.
Bound      Tensor cores, at twice the rate of bf16 if cuBLAS reaches that rate. The matrix product
           writes 4 bytes per element of y. Quantizing and rescaling move more bytes: `eager` moves
           25 per element of x and 22 per element of y, `compiled` moves 3 and 6.
Seen       No variant is faster than `bf16`. A profile shows that cuBLAS multiplies int8 with a
           kernel made for Ampere (`cutlass_80_tensorop_i16832gemm`). That kernel is about as fast
           as the bf16 kernel for Hopper. `compiled` moves fewer bytes than `eager`, but saves about
           twice as much time as these bytes should take. We cannot explain this. We did not measure
           the peak rate of int8, so no time is predicted for the int8 sides.
Use when   You want int8 weights because they take less memory. Do not expect a speedup on Hopper
           for these sizes, and never quantize activations in eager mode. FP8 can be faster: see
           fp8_linear_test.py.
"""

import functools
import importlib.util

import pytest
import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare

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
    return torch.compile(product, dynamic=False)  # compiles a kernel for each size


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


def bf16_product(m, n, k):
    return Cost(read=2 * (m + n) * k, write=2 * m * n, ops={"bf16": 2 * m * n * k}, launches=1)


def int8_product(m, n, k):
    return Cost(read=(m + n) * k, write=4 * m * n, ops={"int8": 2 * m * n * k}, launches=1)


def eager_cost(m, n, k):
    x, y = m * k, m * n
    quantizing = (
        Cost(read=2 * x, write=2 * x, launches=1)  # absolute value
        + Cost(read=2 * x, launches=4)  # the maximum of each row, and the scale from it
        + Cost(read=2 * x, write=4 * x, launches=1)
        + Cost(read=4 * x, write=4 * x, launches=1)
        + Cost(read=4 * x, write=x, launches=1)
    )
    rescaling = 2 * Cost(read=4 * y, write=4 * y, launches=1)
    return (
        quantizing + int8_product(m, n, k) + rescaling + Cost(read=4 * y, write=2 * y, launches=1)
    )


def fused_cost(m, n, k):
    quantizing = Cost(read=2 * m * k, write=m * k, launches=1)
    return quantizing + int8_product(m, n, k) + Cost(read=4 * m * n, write=2 * m * n, launches=1)


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
    # `_int_mm` needs more than 16 rows, and multiples of 8 for n and k.
    check_sizes=[{"m": 33, "n": 40, "k": 1032}],
    work=lambda m, n, k: Work(
        read=2 * (m * k + n * k), write=2 * m * n, flops={"int8": 2 * m * n * k}, terms=k
    ),
    bound="tensor",
    costs={bf16: bf16_product, eager: eager_cost, compiled: fused_cost, torchao: fused_cost},
)
def test_dynamic_int8(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
