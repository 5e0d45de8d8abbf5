"""All-gather: receive straight into the tensor that the next kernel reads.

Problem    Every rank has `rows` rows of a bf16 weight and needs the whole weight, as in a layer of
           a sharded model.
Baseline   listed: `all_gather` into a list of tensors, then `torch.cat` of the list. NCCL gathers
           into one buffer, torch copies the buffer into the tensors of the list, and `cat` copies
           these tensors.
Optimized  views: changes `listed`. The list's tensors are views of the result, so `cat` and its
           copy are not needed.
           into_tensor: `all_gather_into_tensor` writes straight into the result, without any copy.
Bound      NVLink. A copy reads and writes the whole result in DRAM, which takes about a quarter of
           the time of the transfer over NVLink. NVLink multicast was off (README). With multicast,
           a rank would send its rows only once but still receive the same bytes, so multicast would
           save no time.
Seen       On two GPUs, all three sides take about the same amount longer than predicted. The
           predictions use the rate of NCCL's all-reduce. NCCL's all-gather is slower, as the
           README's plot shows for this size. At the plot's rate, all three predictions are within 5
           % of the measured times. On four GPUs, the gains are almost the same. All three sides
           take about a tenth longer than predicted there. So NCCL's all-gather comes closer to the
           all-reduce rate on four GPUs than on two.
Use when   Always gather into one tensor if the next kernel reads one tensor. A list costs two
           additional copies of the whole result.
"""

import torch
import torch.distributed as dist

from pytest_aisp import Conditions, Cost, Work, compare

from .wire_costs import exchange


def inputs(device, rows, columns):
    return (torch.randn(rows, columns, device=device).bfloat16(),)


def reference(ranks):
    whole = torch.cat([shard for (shard,) in ranks])
    return [whole] * len(ranks)


def whole_of(shard):
    rows, columns = shard.shape
    return shard.new_empty(dist.get_world_size() * rows, columns)


def listed(shard):
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, shard)
    return torch.cat(shards)


def views(shard):
    out = whole_of(shard)
    dist.all_gather(list(out.split(len(shard))), shard)
    return out


def into_tensor(shard):
    out = whole_of(shard)
    dist.all_gather_into_tensor(out, shard)
    return out


def copied(nbytes):
    return Cost(read=nbytes, write=nbytes, launches=1)


def gathered(rows, columns, world):
    return exchange(2 * world * rows * columns, world)


def gathered_to_list(rows, columns, world):
    return gathered(rows, columns, world) + world * copied(2 * rows * columns)


def listed_and_joined(rows, columns, world):
    return gathered_to_list(rows, columns, world) + copied(2 * world * rows * columns)


@compare(
    baseline=listed,
    optimized=[views, into_tensor],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 16384, "columns": 4096}],
    check_sizes=[
        {"rows": 33, "columns": 17},
        {"rows": 1, "columns": 1023},
        {"rows": 37, "columns": 80},
    ],
    work=lambda rows, columns, world: Work(wire=2 * (world - 1) * rows * columns),
    bound="nvlink",
    costs={listed: listed_and_joined, views: gathered_to_list, into_tensor: gathered},
    conditions=Conditions(gpus=(2, 4)),
    at_least={"sm90": 1.1},
)
def test_all_gather(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
