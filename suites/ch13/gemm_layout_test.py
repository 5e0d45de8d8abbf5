"""Layouts of a product: a transposed operand needs no copy.

Problem    x @ w in bf16, where x, (m, k), comes transposed, as (k, m) in memory: activations whose
           channels come first. The weight is the layer's and can be stored either way.
Baseline   nt: x is brought into rows by a copy, the weight stands as (n, k), as in `linear`.
Optimized  nn: the same copy, the weight stored as (k, n), once and before.
           tt: x as it comes, a transposed view; the weight as (n, k).
           tn: x as it comes, the weight as (k, n).
           The first letter is x's: n in rows of k, t transposed; the second the weight's: n as
           (k, n), t as (n, k).
Bound      Tensor cores: 69 GFLOP, 0.092 ms at 750 TFLOP/s. Those of Hopper read bf16 from shared
           memory in either order (of fp8 and tf32 only in rows of k), and TMA brings either as
           fast, so that the layouts are neutral to each other: nn 1.0. The copy moves 67 MB, 0.016
           ms at 4.24 TB/s, or three times as long if its kernel transposes without shared memory:
           tt and tn 1.2 to 1.5 times.
Seen       An H200: nn 1.00x; tt 2.33x, tn 2.29x, as the copy takes 0.12 ms: it transposes without
           shared memory, worse than three times as long. Products take 0.093 ms in either layout.
           For odd sizes cuBLAS may split k and add the parts in bf16 (`allow_bf16_reduced_
           precision_reduction`, torch's default): one result is rounded twice, which the page
           accepts.
"""

from types import SimpleNamespace

import torch
from torch.nn import functional as F

from pytest_aisp import Variant, Work, compare


def state(device, m, k, n):
    weight = torch.randn(n, k, device=device) / k**0.5
    return SimpleNamespace(weight=weight.bfloat16())


def inputs(device, m, k, n):
    return (torch.randn(k, m, device=device).bfloat16(),)


def reference(state, x):
    return torch.einsum("km,nk->mn", x.double(), state.weight.double())


def nt(state, x):
    return F.linear(x.T.contiguous(), state.weight)


def nn(state, x):
    weight = state.weight.T.contiguous()
    yield lambda: x.T.contiguous() @ weight


def tt(state, x):
    return F.linear(x.T, state.weight)


def tn(state, x):
    weight = state.weight.T.contiguous()
    yield lambda: x.T @ weight


@compare(
    baseline=nt,
    optimized=[Variant(nn, at_least="neutral"), tt, tn],
    at_least={"sm90": 1.9},
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 8192, "k": 2048, "n": 2048}],
    check_sizes=[{"m": 33, "k": 65, "n": 9}, {"m": 7, "k": 1023, "n": 17}],
    work=lambda m, k, n: Work(
        read=2 * (m + n) * k,
        write=2 * m * n,
        flops={"bf16": 2 * m * n * k},
        terms=k,
        roundings=2,
    ),
    bound="tensor",
)
def test_gemm_layout(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
