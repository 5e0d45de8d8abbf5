"""Launch cost: the host's time to launch a kernel, and the GPU's time to start one in a graph.

Problem    Advance n oscillators in time. Each kernel updates all velocities or all positions from
           the result of the previous kernel. The size `nodes` is the number of kernels.
Baseline   eager: one torch call per kernel. Only the first two calls allocate a tensor.
Optimized  captured: changes `eager`. One CUDA graph contains the same kernels, and the host
           launches the graph once. The capture is not timed. The run prints after how many calls
           the capture pays off. The page times a curve over the number of kernels.
Bound      The host limits `eager`, with one launch per kernel. The kernels do very little work, so
           the GPU waits for the host. The GPU limits `captured`: a kernel starts when the previous
           kernel has ended, and each start takes time. So the times of both sides grow in
           proportion to the number of kernels. For any number of kernels, `captured` also has one
           launch of the graph.
Seen       With two kernels, `captured` takes less than half of the predicted time. The prediction
           is the time to launch one torch operator, including torch's dispatcher and checks. A
           graph replay calls no torch operator. With 32 kernels, `captured` takes slightly longer
           than 32 kernel starts, because the GPU also needs time to start a graph. `eager` takes
           about as long as predicted.
Use when   You want to know whether a graph makes your loop faster. Count the launches of the loop,
           and compare the host's time for them with the GPU's time for the kernels. If a kernel
           runs longer than a launch takes, the GPU is never idle, and a graph saves only the host's
           time. With few kernels, most of the time of `captured` is the launch of the graph itself.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Sweep, Work, capture, compare

DT = 0.125


def inputs(device, nodes, n):
    return torch.randn(n, device=device), torch.randn(n, device=device), nodes


def advance(x, v, nodes):
    """Return positions and velocities after nodes / 2 steps. Each step rotates (x, v) slightly."""
    v = torch.sub(v, x, alpha=DT)
    x = torch.add(x, v, alpha=DT)
    for _ in range(nodes // 2 - 1):
        v.sub_(x, alpha=DT)
        x.add_(v, alpha=DT)
    return x, v


def reference(x, v, nodes):
    x, v = x.double(), v.double()
    for _ in range(nodes // 2):
        v = v - DT * x
        x = x + DT * v
    return x, v


def eager(x, v, nodes):
    return advance(x, v, nodes)


def captured(x, v, nodes):
    yield capture(lambda: advance(x, v, nodes))


def advanced(nodes, n, **starts):
    return Cost(read=8 * n, write=8 * n, ops={"fp32": 2 * nodes * n}, **starts)


@compare(
    baseline=eager,
    optimized=[captured],
    inputs=inputs,
    reference=reference,
    sizes=[{"nodes": nodes, "n": 1024} for nodes in (2, 8, 32, 128, 512)],
    check_sizes=[
        {"nodes": 2, "n": 33},
        {"nodes": 512, "n": 31},
        {"nodes": st.integers(1, 32).map(lambda steps: 2 * steps), "n": st.integers(1, 300)},
    ],
    work=lambda nodes, n: Work(
        read=8 * n, write=8 * n, flops={"fp32": 2 * nodes * n}, roundings=2 * nodes
    ),
    bound="launch",
    costs={
        eager: lambda nodes, n: advanced(nodes, n, launches=nodes),
        captured: lambda nodes, n: advanced(nodes, n, launches=1, graph_nodes=nodes),
    },
    sweep=Sweep("nodes"),
    at_least={"sm90": 3.0},
)
def test_launch_cost(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
