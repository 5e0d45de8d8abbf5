"""Layouts of a matrix product: a transposed operand needs no copy.

Problem    Compute x @ w in bf16. x is (m, k) but is stored transposed, as (k, m), like activations
           in channels-first layout. The weight can be stored in either order.
Baseline   nt: copies x to row-major (m, k) and multiplies. The weight is stored as (n, k), as in
           `linear`.
Optimized  nn: changes `nt`. The weight is stored as (k, n). Reordering the weight is not timed.
           tt: changes `nt`. There is no copy: x is a transposed view.
           tn: changes `tt`. The weight is stored as (k, n). The first letter of a name is the
           layout of x: n is (m, k), t is (k, m). The second letter is the layout of the weight: n
           is (k, n), t is (n, k).
Bound      Tensor cores. On Hopper, tensor cores read bf16 from shared memory in either order, and
           TMA loads either order, so all layouts take the same time. For fp8 and tf32, k must be
           the contiguous dimension.
Seen       The copy of `nt` and `nn` takes about twice as long as predicted. Each of its loads uses
           2 bytes of a 32-byte sector, so the cost counts 32 bytes per element from the L2. Each
           load of a warp also touches 32 cache lines, and the L1 looks up one line per cycle
           (`row_mapping` in chapter 8). The lookups take as long as reading the sectors. If lookups
           and reads do not overlap, they explain the extra time, as in `transpose` in chapter 7. We
           did not measure the overlap.
Use when   An operand is transposed in memory. Pass the view, and do not call `contiguous`. In fp8
           or tf32, k must be the contiguous dimension.

When dimensions are odd, cuBLAS may split k and add the parts in bf16
(`allow_bf16_reduced_precision_reduction`, torch's default). In that case, a result is rounded
twice, which the page's tolerance allows.
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
    """Return the cost of nt and nn. The copy of x reads a 32-byte sector for each element."""
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
