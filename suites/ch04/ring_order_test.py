"""Ring order: let neighbours in a ring be neighbours on the board.

Problem    Every rank gets every rank's `numel` fp32 elements, in world - 1 steps: in each of them a
           rank sends to the next of a ring what it got from the one before.
Baseline   numbered: the ring of the ranks in their order.
Optimized  linked: the same steps, along the ring with the most NVLinks under its hops.
           crossing: along the one with the fewest, as the order of the ranks would be where devices
           of two islands (sockets, pairs with a bridge) alternate; to compare with.
           library: `dist.all_gather_into_tensor`; NCCL looks for rings by itself.
Bound      NVLink: three steps of 16 MiB at 370 GB/s, 0.14 ms. Four GPUs in two islands: linked
           crosses between them twice, one message each way at a time, crossing four times, two
           each way. If they share one link of 50 GB/s, that is 1.0 ms against 2.0: twice as fast.
           Where a switch joins all GPUs, as in H200 boards, all rings are equal, hence neutral;
           others than the numbered one are timed all the same, to show it. On two GPUs there is
           one ring alone: the page needs four. On CPUs, which have no links, ranks of equal parity
           count as linked.
           No GPU has measured this page yet.
"""

import functools
import itertools

import torch
import torch.distributed as dist

from pytest_aisp import Conditions, Variant, Work, compare


def inputs(device, numel):
    return (torch.randn(numel, device=device),)


def reference(ranks):
    return [torch.stack([x.double() for (x,) in ranks])] * len(ranks)


@functools.cache
def rings(device_type, world):
    """Return the rings of `world` ranks of one machine, those with the fewest NVLinks first.

    A ring and its reverse are one; of equal ones that in the ranks' order comes first.
    """
    if device_type == "cuda":
        kind = torch._C._autograd.DeviceType.CUDA
        links = torch._C._distributed_c10d._detect_dma_connectivity(kind, "nvlink").matrix
    else:
        links = [[int((a - b) % 2 == 0) for a in range(world)] for b in range(world)]
    others = itertools.permutations(range(1, world))
    orders = [(0, *order) for order in others if order[0] < order[-1]]
    return sorted(orders, key=lambda ring: sum(links[ring[k - 1]][ring[k]] for k in range(world)))


def gather_along(ring, x):
    world, at = len(ring), ring.index(dist.get_rank())
    before, after = ring[at - 1], ring[(at + 1) % world]
    out = torch.empty(world, x.numel(), device=x.device)
    out[ring[at]] = x
    for step in range(world - 1):
        outgoing, incoming = out[ring[at - step]], out[ring[at - step - 1]]
        both = [dist.P2POp(dist.isend, outgoing, after), dist.P2POp(dist.irecv, incoming, before)]
        for request in dist.batch_isend_irecv(both):
            request.wait()
    return out


def numbered(x):
    return gather_along(tuple(range(dist.get_world_size())), x)


def crossing(x):
    return gather_along(rings(x.device.type, dist.get_world_size())[0], x)


def linked(x):
    return gather_along(rings(x.device.type, dist.get_world_size())[-1], x)


def library(x):
    out = torch.empty(dist.get_world_size() * x.numel(), device=x.device)
    dist.all_gather_into_tensor(out, x)
    return out.view(-1, x.numel())


@compare(
    baseline=numbered,
    optimized=[
        linked,
        Variant(crossing, at_least="yardstick"),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"numel": 4 << 20}],
    check_sizes=[{"numel": 33}, {"numel": 1023}],
    work=lambda numel: Work(wire=3 * 4 * numel),
    bound="nvlink",
    at_least="neutral",
    conditions=Conditions(gpus=4),
)
def test_ring_order(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
