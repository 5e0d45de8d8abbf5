"""Symmetric all-reduce: for a small sum, every rank reads the other ranks' memory, without a ring.

Problem    Sum `numel` fp32 elements over the ranks. A call does not change its input.
Baseline   ring: `dist.all_reduce` on a copy of the input. NCCL chooses the algorithm and the
           protocol.
Optimized  gathered: NCCL gathers all inputs, then a second kernel sums them.
           one_shot: a kernel reads every rank's symmetric buffer and adds the values, with a
           handshake at its start and at its end.
           fused_copy: changes `one_shot`. One kernel both copies the input into the buffer and
           sums.
           pushed: no handshake and no copy. Each rank writes its input into its own slot in all
           other ranks' memory. A float of a slot is -0.0 until the data arrives (Lamport's
           protocol).
           two_shot: changes `one_shot`. Each rank sums only its share of the elements, and writes
           the sums into all ranks' buffers.
           windowed: changes `ring`. The buffer is registered as a symmetric window, for which NCCL
           has special kernels. Symmetric buffers are allocated once. Each call copies its input
           into the buffer. Only `gathered` and `pushed` need no copy.
Bound      Up to 1 MiB, latency: launches, handshakes, and one crossing of NVLink. `pushed` waits
           for one crossing of NVLink and nothing else. `gathered`, `one_shot`, `fused_copy` and
           `pushed` send the whole input to every other rank. `ring`, `two_shot` and `windowed` send
           2 (world - 1) / world times the input. With two ranks, both amounts are equal. With more
           ranks, `ring`, `two_shot` and `windowed` send less, so the other four sides pay off only
           for smaller messages than here. At 16 MiB, NVLink is the limit. The messages stay in the
           L2, as right after a layer has computed them. NVLink multicast was off (README), so
           torch's `multimem_all_reduce_` is not compared here, and `ring` and `windowed` have fewer
           kernels to choose from.
Seen       On two GPUs up to 64 KiB, all sides take about as long as predicted, except `windowed`:
           with 4 KiB, it takes less, because NCCL's kernels for windows are faster than the
           all-reduce in peaks.json. At 1 MiB, `ring`, `gathered`, `one_shot`, `fused_copy` and
           `windowed` take 33 to 80 % longer than predicted, because kernels and NCCL are slower
           with 1 MiB than with the large messages that give the rates. `two_shot` and `pushed` are
           close to the prediction. At 16 MiB, all sides take longer than predicted. The prediction
           uses NCCL's rate at 512 MiB, and NCCL is slower with smaller messages (see the README's
           plot). On four GPUs, peaks.json lacks the rate of a peer copy, so the sides that write
           into other ranks' memory have no prediction. Up to 64 KiB, `ring` takes over 40 % longer
           than on two GPUs. The other sides slow down less than `ring`. So all variants gain more
           than on two GPUs, except `pushed` at 64 KiB, which gains as much. From 1 MiB on,
           `gathered` takes twice as long as `ring`, because a rank receives three inputs.
           `one_shot` also reads three inputs, and is a little slower than `ring` at 1 MiB.
           `fused_copy` and `windowed` are within three percent of `ring` at 1 MiB. `pushed` is
           faster than `ring` at 1 MiB, but gains far less than on two GPUs. Only `two_shot` is
           clearly faster than `ring` at both 1 and 16 MiB.
Use when   Small all-reduces follow each other on the critical path, as in decoding with tensor
           parallelism, and run in a CUDA graph. In a graph, torch's one-shot is about as fast as
           NCCL on two GPUs, and faster on four up to 64 KiB. Without a graph, in a run on two GPUs
           that is not stored, torch's one-shot took half of NCCL's time. Leave messages of many MB
           to NCCL. Do not use gathered for large messages: the more ranks there are, the more time
           it loses.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from pytest_aisp import Conditions, Cost, Sweep, Variant, Work, compare, cuda_module

from .wire_costs import all_reduce_of, all_reduced, exchange, through_memory

kernels = cuda_module("symmetric_all_reduce.cu")
BLOCK, GENERATIONS = 256, 3
SMALL = 1 << 18


def small(numel):
    return numel <= SMALL


def inputs(device, numel):
    return (torch.randn(numel, device=device),)


def reference(ranks):
    total = sum(x.double() for (x,) in ranks)
    return [total] * len(ranks)


def ring(x):
    out = x.clone()
    dist.all_reduce(out)
    return out


def gathered(x):
    parts = torch.empty(dist.get_world_size() * x.numel(), device=x.device)
    dist.all_gather_into_tensor(parts, x)
    return parts.view(-1, x.numel()).sum(dim=0)


def one_shot(x):
    buffer, group = symmetric.empty(x.shape, dtype=x.dtype, device=x.device), dist.group.WORLD
    symmetric.rendezvous(buffer, group)

    def run():
        buffer.copy_(x)
        return torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", group.group_name)

    yield run


def fused_copy(x):
    buffer, group = symmetric.empty(x.shape, dtype=x.dtype, device=x.device), dist.group.WORLD
    symmetric.rendezvous(buffer, group)

    def run():
        return torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x, "sum", group.group_name)

    yield run


def pushed(x):
    rank, world, count = dist.get_rank(), dist.get_world_size(), -(-x.numel() // 4)
    shape, blocks = (GENERATIONS, world, count, 4), -(-count // BLOCK)
    slots = symmetric.empty(shape, dtype=x.dtype, device=x.device).fill_(-0.0)
    handle = symmetric.rendezvous(slots, dist.group.WORLD)
    everyones = [handle.get_buffer(other, shape, x.dtype).data_ptr() for other in range(world)]
    buffers = torch.tensor(everyones, dtype=torch.int64, device=x.device)
    turns = torch.zeros(blocks, dtype=torch.int32, device=x.device)
    handle.barrier(channel=0)  # now the slots of all ranks are free

    def run():
        out = torch.empty_like(x)
        kernels.pushed[blocks, BLOCK](x, out, buffers, turns, rank, world, x.numel())
        return out

    yield run


def two_shot(x):
    buffer, group = symmetric.empty(x.shape, dtype=x.dtype, device=x.device), dist.group.WORLD
    symmetric.rendezvous(buffer, group)

    def run():
        buffer.copy_(x)
        return torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", group.group_name)

    yield run


def windowed(x):
    backend = dist.group.WORLD._get_backend(x.device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        buffer = torch.empty_like(x)
    backend.register_mem_pool(pool, symm=True)

    def run():
        buffer.copy_(x)
        dist.all_reduce(buffer)
        return buffer

    yield run
    torch.cuda.synchronize()
    backend.deregister_mem_pool(pool)


def copied_in(numel):
    return Cost(l2=8 * numel, launches=1)


def after_copy(numel, world):
    return copied_in(numel) + all_reduce_of(4 * numel, world)


def parts_and_sum(numel, world):
    return exchange(4 * world * numel, world) + Cost(l2=4 * (world + 1) * numel, launches=1)


def whole_inputs(numel, world):
    """Return the cost of a kernel that reads the other ranks' whole inputs between handshakes."""
    return through_memory(4 * (world - 1) * numel, signals=3)


def two_shots(numel, world):
    """Return the cost of a kernel that reads its share, and sends the sum, between handshakes."""
    return through_memory(all_reduced(4 * numel, world), signals=3)


@compare(
    baseline=ring,
    optimized=[
        Variant(gathered, at_least="yardstick"),
        Variant(one_shot, gpu_only="symmetric memory", when=small, at_least="neutral"),
        Variant(fused_copy, gpu_only="symmetric memory", when=small, at_least="yardstick"),
        Variant(pushed, gpu_only="symmetric memory", when=small, at_least={"sm90": 2.3}),
        Variant(two_shot, gpu_only="symmetric memory", at_least="neutral"),
        Variant(windowed, gpu_only="symmetric memory", at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"numel": 1 << 10}, {"numel": 1 << 14}, {"numel": 1 << 18}, {"numel": 1 << 22}],
    sweep=Sweep("numel"),
    check_sizes=[{"numel": 33}, {"numel": 1023}],
    work=lambda numel, world: Work(wire=2 * (world - 1) / world * 4 * numel, terms=4),
    bound="latency",
    costs={
        ring: after_copy,
        gathered: parts_and_sum,
        one_shot: lambda numel, world: copied_in(numel) + whole_inputs(numel, world),
        fused_copy: whole_inputs,
        pushed: lambda numel, world: through_memory(4 * (world - 1) * numel, signals=1),
        two_shot: lambda numel, world: copied_in(numel) + two_shots(numel, world),
        windowed: after_copy,
    },
    conditions=Conditions(gpus=(2, 4), l2="warm"),
)
def test_symmetric_all_reduce(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
