"""Peer copy: write into the neighbor's memory instead of sending.

Problem    Every rank sends `numel` fp32 elements to the next rank of a ring.
Baseline   staged: each rank copies its elements to pinned memory that all ranks of the machine
           share, and the next rank copies them to its GPU. Two all-reduces of one element separate
           the writes from the reads, so the host never waits. The memory is allocated and pinned
           once. `staged` shows the cost on a machine without peer access. With NVLink, nobody would
           write staged. To compare sent with `written`, divide their times.
Optimized  sent: NCCL's send and receive, as one batch. An engineer would write this version first.
           written: a copy into the next rank's symmetric memory, between two barriers. After the
           first barrier, the next rank's buffer is free. After the second, this rank's buffer is
           full. The memory is allocated once.
Bound      NVLink, in both directions at once. PCIe limits `staged`: the data crosses PCIe twice,
           one crossing after the other. `sent` copies with kernels on the SMs, and `written` with a
           copy engine. The barriers of written matter only for small messages. NVLink multicast was
           off (README). A message to one GPU does not use multicast.
Seen       `sent` takes longer than predicted at 64 MiB. The prediction uses the rate of a peer
           copy, and NCCL comes close to this rate only with larger messages. The README's plot
           includes an NCCL all-to-all that also sends and receives 64 MiB on two GPUs. The time of
           this all-to-all is within 10 % of the time of `sent` on two GPUs. At 64 MiB, `sent` takes
           over 1.5 times as long on four GPUs as on two, but at 512 MiB, it takes the same time. We
           did not measure why. `written` takes the same time on two and on four GPUs. On four GPUs,
           `staged` takes 1.5 times as long as on two, and 1.5 times as long as the PCIe rate of one
           GPU predicts, probably because four GPUs share the host's memory. So the speedups on four
           GPUs are larger only because `staged` is slower.
Use when   Use NCCL's send and receive by default. Write into symmetric memory when the same buffers
           are used repeatedly, or when the SMs should stay free for compute. Stage through the host
           only if the GPUs have no peer access.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

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
            dist.all_reduce(flag)  # now all ranks have copied to the host
            out = torch.empty_like(x)
            out.copy_(theirs, non_blocking=True)
            dist.all_reduce(flag)  # now all ranks have copied from the host
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
        handle.barrier(channel=0)  # the next rank no longer needs the data of the last call
        theirs.copy_(x)
        handle.barrier(channel=0)  # the previous rank has filled this rank's buffer
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
    check_sizes=[{"numel": 1023}, {"numel": 33}],
    work=lambda numel: Work(wire=4 * numel),
    bound="nvlink",
    costs={
        staged: lambda numel: (
            Cost(d2h=4 * numel, launches=2, collectives=1)
            + Cost(h2d=4 * numel, launches=2, collectives=1)
        ),
        sent: lambda numel: Cost(sent=4 * numel, launches=1, collectives=1),
        written: lambda numel: Cost(sent=4 * numel, launches=3, barriers=2),
    },
    conditions=Conditions(gpus=(2, 4)),
)
def test_peer_copy(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
