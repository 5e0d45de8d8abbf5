"""Ring order: let neighbors in a ring be neighbors on the board.

Problem    Every rank gets every rank's `numel` fp32 elements, in world - 1 steps. In each step, a
           rank sends to the next rank of a ring the elements that it received from the previous
           rank.
Baseline   numbered: a ring in the order of the ranks' numbers.
Optimized  linked: changes `numbered`. The ring is the one whose hops have the most NVLinks.
           crossing: changes `numbered`. The ring is the one whose hops have the fewest NVLinks.
           Such a ring occurs in practice if the rank numbers alternate between two islands
           (sockets, or pairs with a bridge).
           library: `dist.all_gather_into_tensor`, where NCCL chooses the rings.
Bound      NVLink. If a slow link connects two islands of two GPUs, `linked` uses this link twice
           and `crossing` four times, so `crossing` takes twice as long. If a switch joins all GPUs,
           as on H200 boards, all rings should be equally fast, so the page claims only that
           `linked` is not slower. With two GPUs there is only one ring, so the page needs four.
           CPUs have no NVLinks, so on CPUs the page treats ranks of equal parity as `linked`.
           NVLink multicast was off (README). With multicast, `library` could send each rank's
           elements once instead of three times, but every rank would still receive three ranks'
           elements.
Seen       On four H200s, a switch gives every ring the same number of links. So `crossing` uses the
           same ring as `numbered`, and takes the same time. `linked` uses the ring 0, 2, 1, 3, and
           is faster by a third, which the links cannot explain. In `numbered`, rank r sends to rank
           r + 1 and receives from rank r - 1. In `linked`, some ranks have neighbors that are not r
           + 1 and r - 1. NCCL may use more channels in this case, but we did not measure it. At the
           peer rate of two GPUs, the predicted time is half of the time of `numbered` and two
           thirds of the time of `linked`. Each step sends only 16 MiB, and NCCL's sends reach the
           peer rate only with larger messages (peer_copy_test.py). `library` is nearly twice as
           fast as `numbered`. `library` takes about a fifth longer than predicted. The prediction
           uses NCCL's rate at 512 MiB, and NCCL is slower with smaller messages.
Use when   You write your own ring, and no switch joins all GPUs of the machine (see `aisp links
           topology`). In all other cases, let NCCL choose: `library` is the fastest side.
"""

import functools
import itertools

import torch
import torch.distributed as dist

from pytest_aisp import Conditions, Cost, Variant, Work, compare

from .wire_costs import collective, exchange


def inputs(device, numel):
    return (torch.randn(numel, device=device),)


def reference(ranks):
    return [torch.stack([x.double() for (x,) in ranks])] * len(ranks)


@functools.cache
def rings(device_type, world):
    """Return the rings of `world` ranks of one machine, those with the fewest NVLinks first.

    A ring and its reverse count as one ring. Among rings with equally many NVLinks, the ring in
    rank order comes first.
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


def along_ring(numel, world):
    copied = Cost(read=4 * numel, write=4 * numel, launches=1)
    return copied + (world - 1) * collective(4 * numel)


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
    costs={
        numbered: along_ring,
        linked: along_ring,
        crossing: along_ring,
        library: lambda numel, world: exchange(4 * world * numel, world),
    },
    at_least="neutral",
    conditions=Conditions(gpus=4),
)
def test_ring_order(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
