"""Many small GEMMs: one launch instead of a loop.

Problem    `count` independent (n, n) fp32 products.
Baseline   looped: one launch a product, written into a preallocated result.
Optimized  batched: the same multiplications in one launch of `torch.bmm`.
Bound      Launch: `count` x 5 us of host time against one launch and the arithmetic.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Work, compare


def inputs(device, count, n):
    return torch.randn(count, n, n, device=device), torch.randn(count, n, n, device=device)


def reference(a, b):
    return a.double() @ b.double()


def looped(a, b):
    out = torch.empty_like(a)
    for x, y, z in zip(a, b, out, strict=True):
        torch.mm(x, y, out=z)
    return out


def batched(a, b):
    return torch.bmm(a, b)


@compare(
    baseline=looped,
    optimized=[batched],
    inputs=inputs,
    reference=reference,
    sizes=[{"count": 40, "n": 256}],
    check_sizes=[{"count": 3, "n": 33}, {"count": st.integers(1, 9), "n": st.integers(1, 40)}],
    cpu_sizes=[{"count": 256, "n": 16}],
    work=lambda count, n: Work(
        read=8 * count * n * n,
        write=4 * count * n * n,
        flops={"fp32": 2 * count * n**3},
        terms=n,
    ),
    bound="launch",
    at_least={"sm90": 10.0, "cpu": 1.5},
)
def test_batched_gemm(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
