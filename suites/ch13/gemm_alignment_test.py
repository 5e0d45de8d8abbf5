"""Odd dimensions of a product: pad them, so that rows begin where fast kernels can fetch them.

Problem    x @ w.T in bf16, as `linear` computes it: x is (m, k), the layer's weight (n, k). Either
           k is odd, as where features were concatenated, or n, as GPT-2's vocabulary of 50257.
Baseline   odd: `linear` on what there is. Rows of an odd number of bf16 begin at multiples of 2
           bytes; TMA and 16-byte copies to shared memory, on which fast kernels are built, need 16.
Optimized  to_8: the weight is padded with zeros to a multiple of 8, that is 16 bytes, once and
           before. x is padded in each call where k is odd. Where n is, the result has padded rows
           in memory, and what is returned is a view of its first n columns.
           to_64: to the next multiple of 64, 128 bytes, a step of the fast kernels' loops.
Bound      Tensor cores, at 750 TFLOP/s. k odd: 137 GFLOP, 0.18 ms, and 67 MB to pad x, 0.016 ms at
           4.24 TB/s. A kernel that fetches 2 bytes at a time is expected to reach 150 to 250
           TFLOP/s, 0.55 to 0.9 ms: 2.8 to 4.6 times. n odd: 422 GFLOP, 0.56 ms. Operands lie well,
           and only the result cannot leave by TMA: kernels made for Ampere reach some 60 % of an
           H200, so 1.6 times. to_64 computes 1.5 % more than to_8 where k is odd and nothing worth
           mentioning where n is: neutral to each other.
Seen       An H200: k odd takes 1.06 ms, 130 TFLOP/s; to_8 4.5x, to_64 4.6x. n odd takes 5.0 ms,
           85 TFLOP/s, so to_8 8.5x and to_64 8.3x: for both cuBLAS takes kernels made for Turing
           (`cutlass_75_tensorop_bf16_s1688gemm`), not for Ampere.
"""

from types import SimpleNamespace

import torch
from torch.nn import functional as F

from pytest_aisp import Work, compare


def state(device, m, k, n):
    weight = torch.randn(n, k, device=device) / k**0.5
    return SimpleNamespace(weight=weight.bfloat16())


def inputs(device, m, k, n):
    return (torch.randn(m, k, device=device).bfloat16(),)


def reference(state, x):
    return x.double() @ state.weight.double().T


def odd(state, x):
    return F.linear(x, state.weight)


def padded(weight, x, multiple):
    n, k = weight.shape
    wide = F.pad(weight, (0, -k % multiple, 0, -n % multiple))

    def run():
        rows = F.pad(x, (0, -k % multiple)) if k % multiple else x
        return F.linear(rows, wide)[:, :n]

    return run


def to_8(state, x):
    yield padded(state.weight, x, 8)


def to_64(state, x):
    yield padded(state.weight, x, 64)


@compare(
    baseline=odd,
    optimized=[to_8, to_64],
    at_least={"sm90": 3.5},
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 4096, "k": 4097, "n": 4096}, {"m": 4096, "k": 1024, "n": 50257}],
    check_sizes=[
        {"m": 33, "k": 17, "n": 64},
        {"m": 9, "k": 64, "n": 33},
        {"m": 5, "k": 1023, "n": 7},
    ],
    work=lambda m, k, n: Work(
        read=2 * (m + n) * k, write=2 * m * n, flops={"bf16": 2 * m * n * k}, terms=k
    ),
    bound="tensor",
)
def test_gemm_alignment(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
