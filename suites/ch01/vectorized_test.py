"""A Python loop over rows: replace it with one operation on all rows.

Problem    Compute the fp32 Euclidean distances between `queries` query points and `points` other
           points in `dims` dimensions.
Baseline   looped: the distances of one query to all points at a time, with four launches per query.
Optimized  broadcast: the four operations of looped applied to all queries at once, four launches in
           total.
           cdist: `torch.cdist`, which computes |q|^2 + |p|^2 - 2qp with one matrix product, in 12
           launches.
Bound      The host on every side.
Use when   A Python loop does the same small operation on every row. The gain shrinks as rows grow.
           If one row is enough to fill the GPU, there is no gain. `broadcast` needs memory for
           queries x points x dims differences. Use cdist if this is too much. `cdist` loses
           precision for points that are close to each other. In few dimensions, random points
           include such pairs.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare


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


def distances(queries, points, dims, launches, host_steps):
    """Return the cost of all distances. The differences stay in the L2."""
    return Cost(
        read=4 * (queries + points) * dims,
        write=4 * queries * points,
        ops={"fp32": 3 * queries * points * dims},
        launches=launches,
        host_steps=host_steps,
    )


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
    costs={
        # Host steps: one view and four results per query, and one stack at the end.
        looped: lambda queries, points, dims: distances(
            queries, points, dims, launches=4 * queries + 1, host_steps=5 * queries + 1
        ),
        broadcast: lambda **size: distances(**size, launches=4, host_steps=5),
        # Host steps: ten results and six views.
        cdist: lambda **size: distances(**size, launches=12, host_steps=16),
    },
    at_least={"sm90": 150.0, "cpu": 20.0},
)
def test_vectorized(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
