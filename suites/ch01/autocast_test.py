"""Lower precision: run the matrix products on the tensor cores.

Problem    The forward pass of 3 linear layers (width, width) with GELU between them, on `rows`
           rows. Weights, input and output are fp32 on every side.
Baseline   fp32: TF32 is off, as by default, so the products run on the CUDA cores.
Optimized  tf32: changes `fp32`. TF32 is switched on: tensor cores round the operands to 11
           significant bits.
           bf16: changes `fp32`. The forward pass runs under autocast. Operands are cast to bf16 (8
           significant bits), and the values between the layers stay bf16. The time includes the
           casts of the weights and the cast of the result back to fp32.
Bound      Matrix products, which run on CUDA cores in fp32 and on tensor cores in the variants. The
           DRAM traffic of GELU and of the casts takes additional time.
Seen       On an H200, `fp32` takes longer than predicted. The variants do not. The rate `fp32` was
           measured with multiply-adds that load nothing. Matrix products do not reach this rate
           (`../ch11/chunk_count_test.py`).
Use when   Training or inference spends its time in fp32 products. TF32 needs one flag and changes
           no tensor. If 8 significant bits are enough, `bf16` is faster than TF32. Weights that are
           stored in bf16 need no casts. TF32 and bf16 gain little when memory or the host is the
           limit.
"""

import contextlib

import torch
from torch.nn import functional as F

from pytest_aisp import Conditions, Cost, Variant, Work, compare

LAYERS = 3


def inputs(device, rows, width):
    weights = [torch.randn(width, width, device=device) / width**0.5 for _ in range(LAYERS)]
    return torch.randn(rows, width, device=device), weights


@contextlib.contextmanager
def products_in(precision):
    matmul = torch.backends.cuda.matmul  # the flag applies to the whole process, so restore it
    before, matmul.fp32_precision = matmul.fp32_precision, precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


def forward(x, weights):
    for weight in weights[:-1]:
        x = F.gelu(F.linear(x, weight))
    return F.linear(x, weights[-1])


def reference(x, weights):
    return forward(x.double(), [weight.double() for weight in weights])


def fp32(x, weights):
    with products_in("ieee"):
        return forward(x, weights)


def tf32(x, weights):
    with products_in("tf32"):
        return forward(x, weights)


def bf16(x, weights):
    with torch.autocast(x.device.type, torch.bfloat16):
        return forward(x, weights).float()


def layers(rows, width, arithmetic, element):
    """Return the cost of the layers with operands and results of `element` bytes."""
    product = Cost(
        read=element * (rows + width) * width,
        write=element * rows * width,
        ops={arithmetic: 2 * rows * width**2},
        launches=1,
    )
    gelu = Cost(read=element * rows * width, write=element * rows * width, launches=1)
    return (LAYERS - 1) * (product + gelu) + product


def casts(rows, width):
    """Return the cost of casting the input and the weights to bf16, and the output to fp32."""
    before, after = (rows + LAYERS * width) * width, rows * width
    return Cost(read=4 * before + 2 * after, write=2 * before + 4 * after, launches=LAYERS + 2)


@compare(
    baseline=fp32,
    optimized=[
        Variant(tf32, precision="tf32", at_least={"sm90": 6.0}),
        Variant(bf16, precision="bf16", at_least={"sm90": 9.5}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 4096, "width": 4096}],
    check_sizes=[{"rows": 33, "width": 65}],
    work=lambda rows, width: Work(
        read=4 * (rows + LAYERS * width) * width,
        write=4 * rows * width,
        # all sides share one limit: the fastest arithmetic that any side uses
        flops={"bf16": 2 * LAYERS * rows * width**2},
        terms=width,
        roundings=2 * LAYERS,
    ),
    bound="tensor",
    costs={
        fp32: lambda rows, width: layers(rows, width, "fp32", element=4),
        tf32: lambda rows, width: layers(rows, width, "tf32", element=4),
        bf16: lambda rows, width: layers(rows, width, "bf16", element=2) + casts(rows, width),
    },
    conditions=Conditions(owns=["tf32"]),
)
def test_autocast(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
