"""Tensor cores: a matrix product with fewer bits per operand runs on much faster units.

Problem    Compute C = A @ B. A, B and C are fp32 in memory on every side. In test_tensor_cores, all
           matrices are square. In test_one_row, A has one row and B is large.
Baseline   fp32: TF32 is switched off, so the product runs on the CUDA cores. Operands keep their 24
           significant bits.
Optimized  tf32: changes `fp32`. TF32 is switched on. The tensor cores read the same tensors, but
           use only 11 significant bits of each operand.
           bf16: changes `fp32`. Operands are cast to bf16 (8 significant bits), and the result is
           cast back. The time includes the three casts.
           fp16: changes `bf16`. The operands are cast to fp16 instead. `fp16` has 11 significant
           bits, like TF32, but values above 65504 overflow. We simulated the error with random
           operands. The rms error, divided by the rms of the result, was 0.0029 for bf16, 0.0004
           for fp16 and 0.0003 for tf32. Some TF32 kernels truncate the extra bits of fp32 instead
           of rounding, which raises the error to 0.0008. The error did not depend on k.
Bound      test_tensor_cores: arithmetic, on CUDA cores for fp32 and on tensor cores for the
           variants. bf16 and fp16 also spend time on the casts, whose share of the time shrinks as
           n grows.
           test_one_row: DRAM. Each element of B is read for a single multiply-add, and the read
           takes longer than the multiply-add on CUDA cores.
Use when   An fp32 product is large in all three dimensions, and its inputs are not accurate to 24
           bits anyway. Start with TF32, because no tensor has to change. Cast to bf16 or fp16 if
           the casts take little time compared with the product, or store the tensors in the smaller
           type. With one row, TF32 gains nothing. With a few rows, the gain depends on the library:
           its kernel for CUDA cores may always compute a tile of 32 rows, even if most of the rows
           are unused. `../ch01/autocast_test.py` times a whole network, whose values stay bf16
           between the products.
"""

import contextlib

import torch

from pytest_aisp import Conditions, Cost, Variant, Work, compare


def inputs(device, m, n, k):
    return torch.randn(m, k, device=device), torch.randn(k, n, device=device)


def reference(a, b):
    return a.double() @ b.double()


@contextlib.contextmanager
def products_in(precision):
    matmul = torch.backends.cuda.matmul  # the flag applies to the whole process, so restore it
    before, matmul.fp32_precision = matmul.fp32_precision, precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


def fp32(a, b):
    with products_in("ieee"):
        return a @ b


def tf32(a, b):
    with products_in("tf32"):
        return a @ b


def bf16(a, b):
    return (a.bfloat16() @ b.bfloat16()).float()


def fp16(a, b):
    return (a.half() @ b.half()).float()


def needed(m, n, k, arithmetic):
    return Work(
        read=4 * (m * k + k * n),
        write=4 * m * n,
        flops={arithmetic: 2 * m * n * k},
        terms=k,
        roundings=2,  # bf16 and fp16 also round the result
    )


def product(m, n, k, arithmetic, element=4):
    """Return the cost of a product with operands and a result of `element` bytes."""
    return Cost(
        read=element * (m * k + k * n),
        write=element * m * n,
        ops={arithmetic: 2 * m * n * k},
        launches=1,
    )


def with_casts(m, n, k, arithmetic):
    operands, result = m * k + k * n, m * n
    down = Cost(read=4 * operands, write=2 * operands, launches=2)
    up = Cost(read=2 * result, write=4 * result, launches=1)
    return down + product(m, n, k, arithmetic, element=2) + up


common = {
    "inputs": inputs,
    "reference": reference,
    "check_sizes": [
        {"m": 33, "n": 40, "k": 65},
        {"m": 1, "n": 8, "k": 200},
        {"m": 16, "n": 71, "k": 7},
    ],
    "conditions": Conditions(owns=["tf32"]),
}
costs = {
    fp32: lambda m, n, k: product(m, n, k, "fp32"),
    tf32: lambda m, n, k: product(m, n, k, "tf32"),
}


@compare(
    baseline=fp32,
    optimized=[
        Variant(tf32, precision="tf32", at_least={"sm90": 6.9}),
        Variant(bf16, precision="bf16", at_least={"sm90": 7.7}),
        Variant(fp16, precision="fp16", at_least={"sm90": 7.7}),
    ],
    sizes=[{"m": 4096, "n": 4096, "k": 4096}],
    # all sides share one limit: the fastest arithmetic that any side uses
    work=lambda m, n, k: needed(m, n, k, "bf16"),
    bound="tensor",
    costs={
        **costs,
        bf16: lambda m, n, k: with_casts(m, n, k, "bf16"),
        fp16: lambda m, n, k: with_casts(m, n, k, "fp16"),
    },
    **common,
)
def test_tensor_cores(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@compare(
    baseline=fp32,
    optimized=[Variant(tf32, precision="tf32", at_least="neutral")],
    sizes=[{"m": 1, "n": 8192, "k": 8192}],
    work=lambda m, n, k: needed(m, n, k, "tf32"),
    bound="dram",
    costs=costs,
    **common,
)
def test_one_row(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
