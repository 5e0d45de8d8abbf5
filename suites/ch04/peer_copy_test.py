"""Peer copy: the shortest way between two GPUs does not lead through the host.

Problem    Every rank sends `numel` fp32 elements to the next one, in a ring.
Baseline   staged: down to pinned memory that all ranks of the machine share, up again from there by
           the next rank. Two one-element all-reduces on the stream keep writers and readers
           apart, so the host waits for nothing; the memory is made and pinned once.
Optimized  sent: NCCL's send and receive, as one batch.
           written: symmetric memory, made once: a copy into the next rank's buffer, between two
           barriers, which say that its buffer is free and that the own one has been filled.
Bound      NVLink: 64 MiB at 370 GB/s (a peer copy's rate; 450 nominal) take 0.18 ms, in both
           directions at once. staged crosses PCIe twice, one after the other, at some 55 GB/s:
           2.4 ms, 13 times as long, and with copies cut and overlapped still 7 times. sent should
           reach nine tenths of the copy's rate, as NCCL's kernels do on large messages. The two
           barriers of written cost some 15 us, 9 % of 64 MiB and 1 % of 512 MiB.
Seen       Two H200s: staged 2.48 ms, as predicted; sent 9.2x, 249 GB/s each way; written 12.9x, 348
           GB/s with its two barriers. At 512 MiB sent 12.7x, 351 GB/s, and written 386 GB/s, 99 %
           of the best copy between the two (391 in one direction, 383 in each of both) and 86 % of
           the nominal rate. NCCL's kernels send with a few processors, a copy with the copy
           engines.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from hypothesis import strategies as st

from pytest_aisp import Conditions, Cost, Variant, Work, compare

from .host_memory import shared_by_all


def inputs(device, numel):
    return (torch.randn(numel, device=device),)


def reference(ranks):
    return [ranks[rank - 1][0].double() for rank in range(len(ranks))]


def neighbours():
    rank, world = dist.get_rank(), dist.get_world_size()
    return (rank - 1) % world, (rank + 1) % world


def staged(x):
    before, _ = neighbours()
    flag = torch.zeros(1, device=x.device)
    with shared_by_all(x) as hosts:
        mine, theirs = hosts[dist.get_rank()], hosts[before]

        def run():
            mine.copy_(x, non_blocking=True)
            dist.all_reduce(flag)  # everybody has written
            out = torch.empty_like(x)
            out.copy_(theirs, non_blocking=True)
            dist.all_reduce(flag)  # everybody has read
            return out

        yield run


def sent(x):
    before, after = neighbours()
    out = torch.empty_like(x)
    both = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, out, before)]
    for request in dist.batch_isend_irecv(both):
        request.wait()
    return out


def written(x):
    _, after = neighbours()
    out = symmetric.empty(x.shape, dtype=x.dtype, device=x.device)
    handle = symmetric.rendezvous(out, dist.group.WORLD)
    theirs = handle.get_buffer(after, x.shape, x.dtype)

    def run():
        handle.barrier(channel=0)  # the next rank has done with what it got before
        theirs.copy_(x)
        handle.barrier(channel=0)  # the rank before has written
        return out

    yield run


@compare(
    baseline=staged,
    optimized=[
        Variant(sent, at_least={"sm90": 7.0}),
        Variant(written, gpu_only="symmetric memory", at_least={"sm90": 10.0}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"numel": 16 << 20}, {"numel": 128 << 20}],
    check_sizes=[{"numel": 1023}, {"numel": st.integers(33, 2000)}],
    work=lambda numel: Work(wire=4 * numel),
    bound="nvlink",
    costs={
        staged: lambda numel: (
            Cost(d2h=4 * numel, collectives=1) + Cost(h2d=4 * numel, collectives=1)
        ),
        sent: lambda numel: Cost(sent=4 * numel, collectives=1),
        written: lambda numel: Cost(sent=4 * numel, collectives=2),
    },
    conditions=Conditions(gpus=(2, 4)),
)
def test_peer_copy(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
