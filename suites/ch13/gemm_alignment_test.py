"""Odd dimensions of a matrix product: pad them, so that fast GEMM kernels can load the rows.

Problem    Compute x @ w.T in bf16, as `linear` does. x is (m, k), and the weight is (n, k). In one
           size, k is odd, as may happen when features are concatenated. In the other size, n is
           odd: the 50257 tokens of GPT-2's vocabulary.
Baseline   odd: `linear` on the unpadded operands. A row with an odd number of bf16 values may begin
           at any multiple of 2 bytes. Fast kernels use TMA or 16-byte copies, which need rows that
           begin at multiples of 16 bytes.
Optimized  to_8: changes `odd`. The weight is padded with zeros to a multiple of 8 elements (16
           bytes). Padding the weight is not timed. If k is odd, x is padded in each call. If n is
           odd, the result has padded rows, and the function returns a view of n columns.
           to_64: changes `to_8`. The weight is padded to a multiple of 64 elements (128 bytes),
           which is one step of the fast kernels' loop over k.
Bound      Tensor cores. `pad` fills the padded tensor with zeros and copies x into it, which takes
           little time compared with the matrix product.
Seen       `odd` is far slower than predicted in both sizes. A profile shows why: cuBLAS chooses
           kernels made for Turing (`cutlass_75_tensorop_bf16_s1688gemm`), which do not use Hopper's
           tensor core instructions. The prediction assumes a bf16 rate that was measured with
           Hopper's instructions.
Use when   A dimension of a bf16 product is odd, and the weight can be padded once. Multiples of 8
           are enough: padding to a multiple of 64 is barely faster.
"""

from types import SimpleNamespace

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Work, compare


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


def product(m, k, n):
    return Cost(read=2 * (m + n) * k, write=2 * m * n, ops={"bf16": 2 * m * n * k}, launches=1)


def padding(multiple):
    """Return a function that computes the cost of padding x (if k changes) and multiplying."""

    def cost(m, k, n):
        wide, tall = (size + -size % multiple for size in (k, n))
        if wide == k:
            return product(m, wide, tall)
        fill = Cost(write=2 * m * wide, launches=1)
        copy = Cost(read=2 * m * k, write=2 * m * k, launches=1)
        return fill + copy + product(m, wide, tall)

    return cost


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
    costs={odd: product, to_8: padding(8), to_64: padding(64)},
)
def test_gemm_alignment(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
