"""Uneven work: let each warp take its next item when it is done.

Problem    Run n items. Each item is a random generator that runs a given number of steps. A warp
           runs an item, with a different seed in each lane. One item in 128 is heavy: it has 32
           times as many steps as the others. With order=last, the heavy items come after all
           others, as in data that is sorted by size. With order=random, the heavy items are at
           random places. With order=even, all items have the same number of steps, and the page
           claims only that two of the variants are not slower.
Baseline   static_share: as many warps as fit on the GPU. Each warp runs a contiguous share of the
           items.
Optimized  interleaved: changes `static_share`. With W warps in the grid, a warp runs every W-th
           item. So neighboring heavy items go to different warps.
           queue: changes `interleaved`. When a warp has finished an item, it takes the next item by
           an atomic addition to a shared counter.
           queue_by_4: changes `queue`. A warp takes four items at once, so there are a quarter as
           many atomics.
           warp_per_item: changes `static_share`. There are no shares: the grid has a warp for each
           item, and when a block of 8 warps has ended, the GPU starts the next block. A block holds
           its slot on the SM until its slowest warp has ended.
Bound      Integer arithmetic, if all SMs are busy until the end. The time of a heavy item is its
           number of steps times the latency of a multiply-add, no matter how many SMs are idle. So
           the heavy item that starts last decides when the kernel ends. The costs count the steps
           of all items and spread them evenly over the GPU, so all sides have nearly the same
           predicted time. If a side takes longer, the reason is imbalance.
Seen       `static_share` takes longer than predicted. With order=last, it takes several times as
           long as predicted, because the kernel has to wait for the few warps that have the heavy
           items. With order=last, `interleaved` takes as long as predicted, so its warps are
           balanced. `queue` takes longer than `interleaved`. The atomics of `queue` are not the
           reason: with order=even, `queue` makes the same number of atomics and takes as long as
           predicted. A warp of `queue_by_4` takes four heavy items in a row, so `queue_by_4` takes
           even longer. With order=random, every side takes longer than predicted. Probably some
           heavy items start late, and run while other warps are idle. We did not record a timeline.
Use when   Some items take much longer than others, and you do not know which. Start with a warp or
           a block per item, because the GPU's scheduler is a queue too. If you use fixed shares,
           interleave them: interleaving costs nothing, and heavy items are often neighbors. Write
           your own queue if blocks keep data in shared memory or registers between items. If you
           know which items are long, start them first. All warps of a queue update one address, so
           take enough work with each atomic, but so little that each warp comes back several times.
           If all items take the same time, a queue does not help.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("uneven_work.cu")
BLOCK, WARPS, LANES = 256, 8, 32
HEAVIER, EVERY = 32, 128  # a heavy item has HEAVIER times the steps; one item in EVERY is heavy
FACTOR, INCREMENT, MASK = 1664525, 1013904223, 2**32 - 1
STEP_OPS = 4  # fp32 operations in the time of an integer multiply-add


def steps_of_all(n, light):
    return light * (n + (HEAVIER - 1) * (n // EVERY))


def inputs(device, n, light, order):
    seeds = torch.randint(0, 2**31 - LANES, (n,), device=device, dtype=torch.int32)
    counts = torch.full((n,), light, device=device, dtype=torch.int32)
    if order == "even":
        counts.fill_(steps_of_all(n, light) // n)
    else:
        counts[n - n // EVERY :] *= HEAVIER
    if order == "random":
        counts = counts[torch.randperm(n, device=device)]
    return seeds, counts


def reference(seeds, counts):
    """Return the states after all steps. Round k makes 2^k steps if bit k of the count is set."""
    counts = counts.long()[:, None]
    states = seeds.long()[:, None] + torch.arange(LANES, device=seeds.device)
    a, c = FACTOR, INCREMENT  # 2^k steps multiply by a and add c, modulo 2^32
    for k in range(24):
        states = torch.where((counts >> k) % 2 == 1, (a * states + c) & MASK, states)
        a, c = a * a & MASK, (a * c + c) & MASK
    return states.to(torch.int32)


def run(kernel, blocks, seeds, counts, *counter):
    n = seeds.numel()
    out = torch.empty(n, LANES, dtype=torch.int32, device=seeds.device)
    kernel[blocks, BLOCK](seeds, counts, out, FACTOR, INCREMENT, *counter, n)
    return out


def blocks_at_once(seeds):
    """Return how many blocks fit on the GPU, or fewer if warps would get fewer than 8 items."""
    gpu = torch.cuda.get_device_properties(seeds.device)
    resident = gpu.max_threads_per_multi_processor // BLOCK * gpu.multi_processor_count
    return min(resident, -(-seeds.numel() // (8 * WARPS)))


def zero_counter(seeds):
    return torch.zeros(1, dtype=torch.int32, device=seeds.device)


def static_share(seeds, counts):
    return run(kernels.static_share, blocks_at_once(seeds), seeds, counts)


def interleaved(seeds, counts):
    return run(kernels.interleaved, blocks_at_once(seeds), seeds, counts)


def queue(seeds, counts):
    return run(kernels.queue, blocks_at_once(seeds), seeds, counts, zero_counter(seeds))


def queue_by_4(seeds, counts):
    return run(kernels.queue_by_4, blocks_at_once(seeds), seeds, counts, zero_counter(seeds))


def warp_per_item(seeds, counts):
    return run(kernels.warp_per_item, -(-seeds.numel() // WARPS), seeds, counts)


def work(n, light, order):
    return Work(read=8 * n, write=4 * LANES * n)


def fixed(n, light, order, atomics=0):
    ops = {"fp32": STEP_OPS * LANES * steps_of_all(n, light)}
    return Cost(read=8 * n, write=4 * LANES * n, ops=ops, atomics=atomics, launches=1)


def queued(each):
    """Return the cost function of a queue from which a warp takes `each` items at once."""
    fill = Cost(launches=1)
    return lambda n, light, order: fill + fixed(n, light, order, atomics=n / each)


COSTS = {
    **dict.fromkeys([static_share, interleaved, warp_per_item], fixed),
    queue: queued(1),
    queue_by_4: queued(4),
}


@compare(
    baseline=static_share,
    optimized=[
        interleaved,
        Variant(queue, sass="ATOMG"),
        Variant(queue_by_4, sass="ATOMG"),
        warp_per_item,
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**17, "light": 768, "order": order} for order in ("last", "random")],
    check_sizes=[
        {"n": 513, "light": 3, "order": "random"},
        {"n": 300, "light": 2, "order": "last"},
        {
            "n": st.integers(1, 400),
            "light": st.integers(1, 9),
            "order": st.sampled_from(["last", "random"]),
        },
    ],
    work=work,
    bound="issue",
    costs=COSTS,
)
def test_uneven_work(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()


@compare(
    baseline=static_share,
    optimized=[Variant(queue, sass="ATOMG"), warp_per_item],  # could lose most
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**17, "light": 768, "order": "even"}],
    check_sizes=[{"n": 513, "light": 3, "order": "even"}],
    work=work,
    bound="issue",
    costs={side: COSTS[side] for side in (static_share, queue, warp_per_item)},
    at_least="neutral",
)
def test_even_work(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
