"""Lower precision where the products are: fp32, TF32, bf16 autocast.

Problem    Forward of 3 layers of width -> width with GELU on `rows` rows. Weights, input and output
           are fp32 on every side.
Baseline   fp32: TF32 switched off, so the products run on the CUDA cores.
Optimized  tf32: TF32 switched on; the tensor cores round the fp32 operands to 11 significant bits.
           bf16: autocast; operands are cast to bf16 (8 bits) in memory and stay so between layers.
           The casts, of the weights and of the result back to fp32, are inside the time.
Bound      Tensor cores: 412 GFLOP take 8.1 ms at 51 TFLOP/s of fp32, 1.0 ms at 411 of TF32 and
           0.52 ms at 793 of bf16. All else is traffic: GELU moves 0.27 GB (0.06 ms) in fp32, GELU
           and casts move 0.64 GB (0.15 ms) in bf16. Predicted: 7.6x and 12x.
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
    matmul = torch.backends.cuda.matmul  # the flag is the process's: put it back
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
    """Return the cost of casting input and weights to bf16, and the output to fp32."""
    elements = (2 * rows + LAYERS * width) * width
    return Cost(read=4 * elements, write=4 * elements, launches=LAYERS + 2)


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
        # the fastest arithmetic of any side: its peak is the limit of all
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
