"""Occupancy or ILP: independent work in each thread can replace warps.

Problem    test_occupancy_ilp computes a * x for n fp32 elements. test_chains iterates
           z -> a * z + x 2048 times for each of n fp32 elements x. The x-axis of both curves is the
           number of warps on each SM. The grid has just enough blocks for this number of warps, and
           the blocks loop over all elements. So the size of the grid sets the occupancy, and no
           kernel has to waste registers or shared memory.
Baseline   one: a thread has one load in flight.
           one_chain: a thread iterates one number at a time.
Optimized  two: changes one. A thread loads two elements before it stores the first.
           four: like `two`, with four elements.
           eight: like `four`, with eight elements.
           two_chains: changes `one_chain`. A thread has two numbers, whose steps alternate.
           four_chains: like `two_chains`, with four numbers. There is no library variant, because
           no library lets a caller choose the number of warps. For a full GPU,
           `../ch06/ilp_test.py` compares two, four and `eight` loads with a library.
Bound      test_occupancy_ilp: bytes in flight, warps * 32 lanes * loads * 4 bytes per SM. With
           twice the loads per thread, half as many warps are enough. A load takes about 0.4 us when
           few bytes are in flight, and longer when DRAM is busy (`aisp machine peak`, `in_flight`).
           Once enough loads are in flight, DRAM is the limit, and more loads or warps do not help.
           test_chains: a scheduler starts one instruction per cycle, and the result of a
           multiply-add is ready after 4 cycles. So the warps of a scheduler need 4 independent
           chains in total. Each of the SM's 4 schedulers has a quarter of the warps. So 16 warps
           per SM need only one chain per thread, and 4 warps per SM need four. Loading an element
           takes a tenth of the time of its chain.
Seen       On an H100, most points of test_occupancy_ilp take up to a fifth longer than predicted.
           With 4 or 8 warps, `four` and `eight` take longer than that. Among points with the same
           number of bytes in flight, the point with the most warps is the fastest, until DRAM is
           the limit. The likely reason is that a thread starts new loads only when all of its loads
           have arrived, so a thread with many loads often waits for the last one.
Use when   Few warps fit on an SM because a thread needs many registers, or a block needs much
           shared memory. Give each thread more independent work instead of forcing more warps onto
           the SM. More work per thread also needs registers, so measure both ways. On an SM full of
           warps, more independent arithmetic gains nothing, but more loads in flight can still
           help.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Sweep, Variant, Work, compare, cuda_module

kernels = cuda_module("occupancy_ilp.cu")
A = 0.75
BLOCK, LANES, SMS = 128, 32, 132  # the SMs of an H200, for sizes
STEPS = 2048
# After this many steps, a chain still changes by 0.03 % per step, so no step can be skipped.
DECAY = 1 - 1 / STEPS
LATENCY, SCHEDULERS = 4, 4  # cycles per multiply-add, schedulers per SM
WARPS = (4, 8, 16, 32, 64)


def normal(device, n, warps):
    return torch.randn(n, device=device), warps


def scaled(x, warps):
    return A * x.double()


def iterated(x, warps):
    z = x = x.double()
    for _ in range(STEPS):
        z = DECAY * z + x
    return z


def walk(kernel, each, warps, factor, x):
    """Launch enough blocks for `warps` warps on each SM, or fewer if there are few elements."""
    out = torch.empty_like(x)
    blocks = (
        warps * LANES // BLOCK * torch.cuda.get_device_properties(x.device).multi_processor_count
    )
    kernel[min(blocks, -(-x.numel() // (2 * BLOCK * each))), BLOCK](factor, x, out, x.numel())
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
    return walk(kernels.iterate_1, 1, warps, DECAY, x)


def two_chains(x, warps):
    return walk(kernels.iterate_2, 2, warps, DECAY, x)


def four_chains(x, warps):
    return walk(kernels.iterate_4, 4, warps, DECAY, x)


def waiting(each):
    """Return the cost of a side of test_occupancy_ilp with `each` loads in flight per thread."""

    def moved(n, warps):
        in_flight = 4 * LANES * warps * each
        return Cost(read=4 * n, write=4 * n, in_flight=in_flight, ops={"fp32": n}, launches=1)

    return moved


def issued(chains):
    """Return the cost of a side of test_chains: its operations and the empty issue slots."""

    def stepped(n, warps):
        busy = min(1, warps / SCHEDULERS * chains / LATENCY)
        return Cost(read=4 * n, write=4 * n, ops={"fp32": 2 * STEPS * n / busy}, launches=1)

    return stepped


@compare(
    baseline=one,
    optimized=[
        Variant(two, at_least={"sm90": 1.4}),
        Variant(four, at_least={"sm90": 2.2}),
        Variant(eight, at_least={"sm90": 3.1}),
    ],
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
    inputs=normal,
    reference=iterated,
    sizes=[{"n": SMS * 2**15, "warps": warps} for warps in (4, 16, 64)],
    check_sizes=[
        {"n": 1023, "warps": 64},
        {"n": 515, "warps": 4},
    ],
    # No flops are declared: the chains may run at the full fp32 rate. If the clock is higher now
    # than when this rate was measured, the harness would report skipped work.
    work=lambda n, warps: Work(read=4 * n, write=4 * n, roundings=STEPS),
    bound="issue",
    costs={one_chain: issued(1), two_chains: issued(2), four_chains: issued(4)},
    sweep=Sweep("warps", judged=[4]),
)
def test_chains(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
