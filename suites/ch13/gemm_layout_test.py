"""Layouts of a product: a transposed operand needs no copy.

Problem    x @ w in bf16. x is (m, k), but in memory it is transposed, as (k, m): activations whose
           channels come first. The weight can be stored in either order.
Baseline   nt: copies x into rows and multiplies. The weight is stored as (n, k), as in `linear`.
Optimized  nn: the baseline with the weight stored as (k, n). The reordering is not timed.
           tt: the baseline without the copy. x is a transposed view.
           tn: tt with the weight stored as (k, n).
           The first letter is the layout of x: n in rows of k, t transposed. The second is the
           weight's: n as (k, n), t as (n, k).
Bound      Tensor cores. Those of Hopper read bf16 from shared memory in either order, and TMA loads
           either order, so the layouts cost the same. fp8 and tf32 must be in rows of k.
Seen       The copy takes about twice as long as predicted. Each of its loads takes 2 bytes of a
           sector of 32 bytes, so the cost counts 32 bytes per element from the L2. Each load of a
           warp also touches 32 lines, which the L1 looks up one per cycle (row_mapping of chapter
           8). These lookups take as long as the sectors. If the two do not overlap, they explain
           the time, as in transpose of chapter 7. That was not measured.
Use when   An operand is transposed in memory: pass the view, and do not call `contiguous`. In fp8
           or tf32 the operand must be in rows of k.

When dimensions are odd, cuBLAS may split k and add the parts in bf16
(`allow_bf16_reduced_precision_reduction`, torch's default). One result is then rounded twice, which
the page accepts.
"""

from types import SimpleNamespace

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare


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


def product(m, k, n):
    return Cost(read=2 * (m + n) * k, write=2 * m * n, ops={"bf16": 2 * m * n * k}, launches=1)


def copied(m, k, n):
    """Return the cost of nt and nn: the copy reads a sector of 32 bytes for each element."""
    return Cost(read=2 * m * k, write=2 * m * k, l2=34 * m * k, launches=1) + product(m, k, n)


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
    costs={nt: copied, nn: copied, tt: product, tn: product},
)
def test_gemm_layout(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
