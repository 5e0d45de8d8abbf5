"""Fuse or capture: a graph removes launches, and a fused kernel also removes memory traffic.

Problem    Compute y = silu(a * x + b) * gate + x on n fp32 elements, at a size where launches are
           the limit, and at a size where DRAM is the limit.
Baseline   eager: four kernels, each of which reads its inputs from memory and writes its result.
Optimized  captured: changes `eager`. A CUDA graph contains the same four kernels.
           fused: changes `eager`. One kernel keeps all intermediate values in registers.
           fused_captured: changes `fused`. A CUDA graph contains the fused kernel. Both sides make
           one launch.
Bound      At the small n, the host is the limit: `eager` makes four launches, and each variant
           makes one. The data stays in the L2. At the large n, DRAM is the limit: `eager` and
           `captured` read six arrays and write four, and the fused kernel reads two and writes one.
           The host launches the next kernel while the GPU is still running the previous one, so a
           graph saves nothing.
Seen       At the small n, a launch through `cuda_module` takes the host longer than predicted,
           because the predicted time was measured with a torch operator. On an H200, the launch
           takes more than twice as long as predicted. So `eager` and `fused` take longer than
           predicted, and graphs have a larger speedup than predicted. A graph replay calls no torch
           operator, so `fused_captured` takes less time than predicted. On an H100, `captured` also
           takes less time than predicted. The host's times also vary from one comparison to the
           next. At the large n, two kernels of eager each move as many bytes as `single` in
           `../ch06/ilp_test.py`. The other two each move as many bytes as `usual` in
           `../ch06/block_size_test.py`. The times on those pages add up to the time of `eager`.
           Those pages also explain why a kernel with one element per thread does not reach the copy
           rate. `fused` moves as many bytes as `usual`, but takes longer. In its machine code for
           sm_90, the gate is loaded only after the division. An exact division has a branch to a
           slow path, and the compiler moves no load across this branch. So a thread waits for DRAM
           twice in a row, with one load in flight each time. We did not try a kernel that loads x
           and the gate first.
Use when   First find out what limits your code. If the GPU is idle between kernels, capture a
           graph, which needs no new kernels. If memory is the limit, fuse. A graph of one kernel
           helps only if the host takes less time to replay the graph than to launch the kernel. The
           pages of chapter 9 fuse kernels, and compare them with torch.compile.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, capture, compare, cuda_module

kernels = cuda_module("fused_or_captured.cu")
BLOCK = 256
A, B = 0.75, -0.25


def inputs(device, n):
    return torch.randn(n, device=device), torch.randn(n, device=device)


def reference(x, gate):
    x = x.double()
    inner = A * x + B
    return inner * torch.sigmoid(inner) * gate.double() + x


def by_four(x, gate):
    n, grid = x.numel(), (-(-x.numel() // BLOCK), BLOCK)
    first, second, third, out = (torch.empty_like(x) for _ in range(4))
    kernels.affine[grid](A, B, x, first, n)
    kernels.silu[grid](first, second, n)
    kernels.multiply[grid](second, gate, third, n)
    kernels.add[grid](third, x, out, n)
    return out


def by_one(x, gate):
    out = torch.empty_like(x)
    kernels.fused[-(-x.numel() // BLOCK), BLOCK](A, B, x, gate, out, x.numel())
    return out


def eager(x, gate):
    return by_four(x, gate)


def captured(x, gate):
    yield capture(lambda: by_four(x, gate))


def fused(x, gate):
    return by_one(x, gate)


def fused_captured(x, gate):
    yield capture(lambda: by_one(x, gate))


def four_passes(n, **starts):
    """Return the cost of the four kernels. `starts` is the cost to start each kernel."""
    starts["blocks"] = -(-n // BLOCK)

    def kernel(reads, sfu=0):
        return Cost(read=4 * reads * n, write=4 * n, ops={"fp32": 2 * n}, sfu=sfu, **starts)

    return kernel(1) + kernel(1, sfu=2 * n) + 2 * kernel(2)


def one_pass(n, **starts):
    blocks = -(-n // BLOCK)
    return Cost(read=8 * n, write=4 * n, ops={"fp32": 8 * n}, sfu=2 * n, blocks=blocks, **starts)


@compare(
    baseline=eager,
    optimized=[
        Variant(captured, at_least="neutral"),  # with the large n, nothing is gained
        Variant(fused, at_least={"sm90": 2.4}),
        Variant(fused_captured, at_least={"sm90": 2.4}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**12}, {"n": 2**27}],
    check_sizes=[{"n": 1023}, {"n": st.integers(33, 3000)}],
    work=lambda n: Work(read=8 * n, write=4 * n, flops={"fp32": 6 * n}, terms=2, roundings=8),
    bound="launch",
    costs={
        # A host step is the `empty_like` before the launch.
        eager: lambda n: four_passes(n, launches=1, host_steps=1),
        captured: lambda n: Cost(launches=1) + four_passes(n, graph_nodes=1),
        fused: lambda n: one_pass(n, launches=1, host_steps=1),
        fused_captured: lambda n: one_pass(n, launches=1, graph_nodes=1),
    },
)
def test_fused_or_captured(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
