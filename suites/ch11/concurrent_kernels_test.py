"""Concurrent kernels: run small kernels side by side, in streams or in one launch.

Problem    Evaluate `jobs` fp32 polynomials with `count` coefficients, each at its own n points. A
           thread evaluates one point, and a block evaluates 128 points. So the kernel of one
           polynomial has too few blocks to fill the GPU.
Baseline   in_turn: one kernel per polynomial, all on one stream.
Optimized  four_streams: changes `in_turn`. The kernels take turns on four streams, so four of them
           run at once.
           a_stream_each: like `four_streams`, with as many streams as polynomials.
           one_launch: changes `in_turn`. One kernel evaluates all polynomials, with one row of
           blocks per polynomial.
Bound      Latency. Each multiply-add of Horner's rule needs the result of the previous one. An SM
           with one block has one warp per scheduler, so no other warp can issue while a warp waits.
           Before every eight steps, a warp also waits for coefficients from shared memory: the
           machine code for sm_90 does not load them in advance. So running more kernels at once
           takes no extra time until their blocks need more SMs than the GPU has.
           The costs count the empty issue slots of running warps and of idle SMs as work. The costs
           also add up the start times of all kernels, as if no two kernels started at the same
           time. The data is less than 1 MB, so it stays in the L2.
Seen       On an H100, the speedup of `one_launch` over `in_turn` is as predicted. `a_stream_each`
           takes less time than predicted, because starts on different streams overlap.
Use when   You have several independent kernels, and none of them fills the GPU. If all jobs run the
           same code, use one launch: it needs neither streams nor events. If the kernels differ,
           use streams. If the host cannot launch kernels fast enough, capture a graph
           (`graph_branches_test.py`). Kernels that fill the GPU gain nothing.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Conditions, Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("concurrent_kernels.cu")
BLOCK = 128
SMS = 132  # of an H200, for costs
# Cycles per step, for costs: 4 until the result of a multiply-add is ready, and 32 per eight steps
# to wait for loads from shared memory (16 ns, README of chapter 2).
LATENCY = 4 + 32 / 8


def inputs(device, jobs, count, n):
    points = torch.rand(jobs, n, device=device) * 2 - 1
    return torch.randn(jobs, count, device=device), points


def reference(coefficients, points):
    """Return the values. Add 32 terms at a time, and combine these sums with Horner's rule."""
    jobs, count = coefficients.shape
    short = torch.zeros(jobs, -count % 32, dtype=torch.float64, device=points.device)
    blocks = torch.cat([short, coefficients.double()], 1).view(jobs, -1, 32)
    points = points.double()
    powers = torch.stack([points**k for k in range(31, -1, -1)], 1)
    values = blocks @ powers
    step = points**32
    total = values[:, 0]
    for k in range(1, values.shape[1]):
        total = total * step + values[:, k]
    return total


def evaluated(coefficients, points, out):
    n = points.numel()
    kernels.one[-(-n // BLOCK), BLOCK](coefficients, coefficients.numel(), points, out, n)


def in_turn(coefficients, points):
    out = torch.empty_like(points)
    for job in zip(coefficients, points, out, strict=True):
        evaluated(*job)
    return out


def on_streams(coefficients, points, width):
    gpu = torch.get_device_module(points.device)
    out, main = torch.empty_like(points), gpu.current_stream()
    # High-priority streams have their own pool, so none of them is the current stream.
    streams = [gpu.Stream(priority=-1) for _ in range(width)]
    for stream in streams:
        stream.wait_stream(main)
    for k, job in enumerate(zip(coefficients, points, out, strict=True)):
        with gpu.stream(streams[k % width]):
            evaluated(*job)
    for stream in streams:
        main.wait_stream(stream)
    return out


def four_streams(coefficients, points):
    return on_streams(coefficients, points, 4)


def a_stream_each(coefficients, points):
    return on_streams(coefficients, points, len(points))


def one_launch(coefficients, points):
    jobs, n = points.shape
    out = torch.empty_like(points)
    grid = -(-n // BLOCK), jobs
    kernels.many[grid, BLOCK](coefficients, coefficients.shape[1], points, out, n)
    return out


def at_once(jobs, count, n, launches):
    """Return the cost of `jobs` polynomials at the same time. Latency limits small grids."""
    blocks = jobs * -(-n // BLOCK)
    slots = LATENCY * BLOCK * count  # of one block; other blocks on its SM can fill the empty slots
    together = max(SMS * slots, blocks * BLOCK * count)
    return Cost(
        read=4 * jobs * (count + n),
        write=4 * jobs * n,
        ops={"fp32": 2 * together},
        launches=launches,
    )


@compare(
    baseline=in_turn,
    optimized=[
        Variant(four_streams, at_least={"sm90": 3.3}),
        Variant(a_stream_each, at_least={"sm90": 9.8}),
        Variant(one_launch, at_least={"sm90": 10}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"jobs": 16, "count": 4096, "n": 1024}],
    check_sizes=[
        {"jobs": 5, "count": 37, "n": 131},
        {"jobs": 1, "count": 1030, "n": 3},
        {"jobs": st.integers(1, 6), "count": st.integers(1, 70), "n": st.integers(1, 140)},
    ],
    work=lambda jobs, count, n: Work(
        read=4 * jobs * (count + n),
        write=4 * jobs * n,
        flops={"fp32": 2 * jobs * count * n},
        terms=count,
        roundings=2,
    ),
    bound="latency",
    costs={
        in_turn: lambda jobs, count, n: jobs * at_once(1, count, n, launches=1),
        four_streams: lambda jobs, count, n: -(-jobs // 4) * at_once(min(4, jobs), count, n, 4),
        a_stream_each: lambda jobs, count, n: at_once(jobs, count, n, launches=jobs),
        one_launch: lambda jobs, count, n: at_once(jobs, count, n, launches=1),
    },
    conditions=Conditions(l2="warm"),
)
def test_concurrent_kernels(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
