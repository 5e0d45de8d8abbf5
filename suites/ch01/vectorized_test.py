"""A Python loop over rows: one operation over all of them.

Problem    Euclidean distance from each of `queries` points to each of `points` points, fp32, in
           `dims` dimensions.
Baseline   looped: query by query, each against all points at once.
Optimized  broadcast: the same four operations, over all queries at once.
           cdist: the library's answer, with one matrix product: |q|2 + |p|2 - 2qp.
Bound      Host: 256 x 4 launches of 5 us and a `stack`, against 4 launches, or the 12 of `cdist`:
           250 and 85 times. `broadcast` pays in memory, queries x points x dims differences at
           once, here 16 MiB; `cdist` pays with cancellation where points lie close together.
           Below some 12 dimensions random points do, and the check then refuses it.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Variant, Work, compare


def inputs(device, queries, points, dims):
    return torch.randn(queries, dims, device=device), torch.randn(points, dims, device=device)


def reference(q, p):
    return (q.double().unsqueeze(1) - p.double()).norm(dim=2)


def looped(q, p):
    return torch.stack([(row - p).square().sum(dim=1).sqrt() for row in q])


def broadcast(q, p):
    return (q.unsqueeze(1) - p).square().sum(dim=2).sqrt()


def cdist(q, p):
    return torch.cdist(q, p)


@compare(
    baseline=looped,
    optimized=[broadcast, Variant(cdist, at_least={"sm90": 50.0, "cpu": 8.0})],
    inputs=inputs,
    reference=reference,
    sizes=[{"queries": 256, "points": 256, "dims": 64}],
    check_sizes=[
        {"queries": 5, "points": 33, "dims": 17},
        {"queries": st.integers(1, 9), "points": st.integers(1, 40), "dims": st.integers(20, 40)},
    ],
    cpu_sizes=[{"queries": 128, "points": 16, "dims": 16}],
    work=lambda queries, points, dims: Work(
        read=4 * (queries + points) * dims,
        write=4 * queries * points,
        flops={"fp32": 3 * queries * points * dims},
        terms=dims,
        roundings=3,
    ),
    bound="host",
    at_least={"sm90": 150.0, "cpu": 20.0},
)
def test_vectorized(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
