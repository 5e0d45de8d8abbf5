"""Cooperative groups: a barrier for the whole grid instead of a launch per step.

Problem    Compute 64 steps of heat diffusion on a ring of n fp32 cells. Each cell needs three cells
           of the previous step, so all blocks must finish a step before the next one begins.
Baseline   launches: one kernel per step. The end of a kernel is the barrier.
Optimized  captured: changes `launches`. A CUDA graph contains the same kernels, and the host
           launches the graph once.
           grid_sync: changes `launches`. One cooperative kernel does all steps. All its blocks run
           at the same time, and wait for each other at a `grid.sync()` after each step.
Bound      The host limits `launches`, because launching a step takes longer than running it. The
           cells stay in the L2, so a step is short. `captured` also starts 64 kernels, but the GPU
           starts them without the host, which takes less time. `grid_sync` needs 63 barriers. At
           each barrier, every block does an atomic on one address and waits for the slowest block.
           The cost counts the atomics as in `block_atomics_test.py`. The cost leaves out the wait,
           which was not measured. For this stencil, a fourth way is faster than all three: a block
           that also loads 64 cells at each end computes all 64 steps without any barrier between
           blocks. This way is not a variant, because it works only if a cell depends on nearby
           cells alone. On this page, the stencil stands for steps that may depend on the whole
           previous step.
Seen       `grid_sync` is slower than `captured`: a barrier takes longer than the start of a kernel
           in a graph. If the cost is right, the atomics take about a third of a barrier's time. At
           a barrier, a block waits three times: until its stores have reached the L2, until its
           atomic has returned, and until it reads that the last block has arrived. We did not
           measure any of these waits. `launches` takes longer than predicted: a launch through
           `cuda_module` takes the host more than twice as long as the rate `launch` predicts. That
           rate was measured with a torch operator. We did not measure which part of a launch takes
           the time.
Use when   A barrier is needed between short steps, and threads can keep data from step to step in
           registers or shared memory. At the end of a kernel, such data would be lost. If you only
           want to save launches, capture a graph first: it needs no new kernel. All blocks of the
           grid must fit on the GPU at once.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, capture, compare, cuda_module

kernels = cuda_module("cooperative_groups.cu")
step_kernels = cuda_module("cooperative_groups_step.cu")
BLOCK = 256
STEPS, RATE = 64, 0.25
ADDRESSES = 850  # see block_atomics_test.py


def inputs(device, n):
    return (torch.randn(n, device=device),)


def reference(u):
    u = u.double()
    for _ in range(STEPS):
        u = u + RATE * (u.roll(1) - 2 * u + u.roll(-1))
    return u


def launches(u):
    n, states = u.numel(), (torch.empty_like(u), torch.empty_like(u))
    for k in range(STEPS):
        step_kernels.step[-(-n // BLOCK), BLOCK](RATE, u, states[k % 2], n)
        u = states[k % 2]
    return u


def captured(u):
    yield capture(lambda: launches(u))


def grid_sync(u):
    n, even, odd = u.numel(), torch.empty_like(u), torch.empty_like(u)
    gpu = torch.cuda.get_device_properties(u.device)
    resident = gpu.max_threads_per_multi_processor // BLOCK * gpu.multi_processor_count
    grid = min(resident, -(-n // BLOCK))
    kernels.all_steps.launch(grid, BLOCK, cooperative=True)(RATE, u, even, odd, n, STEPS)
    return odd  # STEPS is even, so the last step wrote `odd`


def stepped(n, **starts):
    """Return the cost of one step on cells that are in the L2."""
    return Cost(l2=8 * n, ops={"fp32": 5 * n}, **starts)


def synced(n):
    """Return the cost of all steps in one kernel. At a barrier, each block does an atomic."""
    barrier = Cost(atomics=ADDRESSES * -(-n // BLOCK))
    return started(n, 1) + (STEPS - 1) * (stepped(n) + barrier) + stepped(n)


def started(n, launches):
    """Return the cost of the first read and the last write."""
    return Cost(read=4 * n, write=4 * n, launches=launches)


@compare(
    baseline=launches,
    optimized=[
        Variant(captured, at_least={"sm90": 5.0}),
        Variant(grid_sync, at_least={"sm90": 2.4}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**17}],
    check_sizes=[{"n": 1023}, {"n": st.integers(3, 600)}],
    work=lambda n: Work(read=4 * n, write=4 * n, flops={"fp32": 4 * STEPS * n}),
    bound="launch",
    costs={
        launches: lambda n: started(n, 0) + STEPS * stepped(n, blocks=-(-n // BLOCK), launches=1),
        captured: lambda n: (
            started(n, 1) + STEPS * stepped(n, blocks=-(-n // BLOCK), graph_nodes=1)
        ),
        grid_sync: synced,
    },
)
def test_cooperative_groups(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
