"""Occupancy against ILP: more work per thread replaces warps, until the warps are enough.

Problem    test_occupancy_ilp computes a * x for n fp32 elements. test_chains iterates
           z -> z * z + c 256 times for each of n fp32 numbers c. The key of the curve is the
           number of warps on each SM. The grid has only as many blocks as that, and they walk all
           elements. So occupancy is the size of the grid, and no resource is wasted to lower it.
Baseline   one: a thread has one load in flight.
           one_chain: a thread iterates one number at a time.
Optimized  two: of one. A thread loads two elements before it stores the first.
           four: of two, with four elements.
           eight: of four, with eight elements.
           two_chains: of one_chain. Two numbers per thread, whose steps alternate.
           four_chains: of two_chains, with four numbers.
           No library lets a caller choose the number of warps. `../ch06/ilp_test.py` compares the
           same change with a library on a full GPU.
Bound      test_occupancy_ilp: bytes in flight, warps * 32 lanes * loads * 4 bytes per SM. Twice the
           loads allow half the warps. Above about 13 KiB (`../ch07/vector_width_test.py`), DRAM is
           the limit, and neither helps. An SM full of threads that load one element stays below it.
           test_chains: a scheduler starts an instruction per cycle, and a multiply-add takes 4
           cycles. A scheduler has a fourth of the SM's warps, and needs warps * chains = 4. So one
           chain is enough with 16 warps per SM, and four chains are enough with 4.
Use when   Few warps fit an SM because a thread needs many registers, or a block much shared memory.
           Give each thread more independent work instead of forcing more warps. That also needs
           registers, so compare both. If the SM is full of warps, independent arithmetic gains
           nothing, and loads in flight still can.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Sweep, Work, compare, cuda_module

kernels = cuda_module("occupancy_ilp.cu")
A = 0.75
BLOCK, LANES, SMS = 128, 32, 132  # the SMs of an H200, for costs
STEPS = 256
# While a thread waits for DRAM, the GPU could do so many operations: 0.8 us at its fp32 rate.
WAIT = 4.8e7
LATENCY, SCHEDULERS = 4, 4  # cycles of a multiply-add, and schedulers of an SM
WARPS = (4, 8, 16, 32, 64)


def normal(device, n, warps):
    return torch.randn(n, device=device), warps


def scaled(x, warps):
    return A * x.double()


def constants(device, n, warps):
    """Return numbers c for which the iteration stays bounded and forgets its rounding errors."""
    return 0.6 * torch.rand(n, device=device) - 0.4, warps


def iterated(x, warps):
    c = z = x.double()
    for _ in range(STEPS):
        z = z * z + c
    return z


def walk(kernel, each, warps, *arguments):
    """Launch blocks for so many warps on each SM, or fewer if there are few elements."""
    x = arguments[-1]
    out = torch.empty_like(x)
    blocks = (
        warps * LANES // BLOCK * torch.cuda.get_device_properties(x.device).multi_processor_count
    )
    kernel[min(blocks, -(-x.numel() // (2 * BLOCK * each))), BLOCK](*arguments, out, x.numel())
    return out


def one(x, warps):
    return walk(kernels.scale_1, 1, warps, A, x)


def two(x, warps):
    return walk(kernels.scale_2, 2, warps, A, x)


def four(x, warps):
    return walk(kernels.scale_4, 4, warps, A, x)


def eight(x, warps):
    return walk(kernels.scale_8, 8, warps, A, x)


def one_chain(x, warps):
    return walk(kernels.iterate_1, 1, warps, x)


def two_chains(x, warps):
    return walk(kernels.iterate_2, 2, warps, x)


def four_chains(x, warps):
    return walk(kernels.iterate_4, 4, warps, x)


def waiting(each):
    """Return the cost of a page's side: its bytes, or one wait for each round of loads."""

    def moved(n, warps):
        rounds = n / (SMS * warps * LANES * each)
        return Cost(read=4 * n, write=4 * n, ops={"fp32": n + WAIT * rounds}, launches=1)

    return moved


def issued(chains):
    """Return the cost of a page's side: its operations, and the slots that it leaves empty."""

    def stepped(n, warps):
        busy = min(1, warps / SCHEDULERS * chains / LATENCY)
        return Cost(read=4 * n, write=4 * n, ops={"fp32": 2 * STEPS * n / busy}, launches=1)

    return stepped


@compare(
    baseline=one,
    optimized=[two, four, eight],
    inputs=normal,
    reference=scaled,
    sizes=[{"n": SMS * 2**20, "warps": warps} for warps in WARPS],
    check_sizes=[
        {"n": 1023, "warps": 64},
        {"n": st.integers(1, 5000), "warps": st.just(4)},
    ],
    work=lambda n, warps: Work(read=4 * n, write=4 * n, flops={"fp32": n}),
    bound="dram",
    costs={one: waiting(1), two: waiting(2), four: waiting(4), eight: waiting(8)},
    sweep=Sweep("warps", judged=[8]),
)
def test_occupancy_ilp(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@compare(
    baseline=one_chain,
    optimized=[two_chains, four_chains],
    inputs=constants,
    reference=iterated,
    sizes=[{"n": SMS * 2**18, "warps": warps} for warps in (4, 16, 64)],
    check_sizes=[
        {"n": 1023, "warps": 64},
        {"n": 515, "warps": 4},
    ],
    # No flops: the chains may run at the full rate of fp32. At a higher clock than the one at which
    # that rate was measured, they would look like skipped work.
    work=lambda n, warps: Work(read=4 * n, write=4 * n),
    bound="issue",
    costs={one_chain: issued(1), two_chains: issued(2), four_chains: issued(4)},
    sweep=Sweep("warps", judged=[4]),
)
def test_chains(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
