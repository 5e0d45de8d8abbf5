"""Gradient all-reduce: one large message instead of many small ones.

Problem    Sum `count` gradients of `numel` fp32 elements over the ranks, as a training step does.
Baseline   per_tensor: one all-reduce per gradient, on a copy of the gradient, because a call on
           this page must not change its inputs. A training step reduces in place, without these
           copies.
Optimized  bucketed: the gradients are concatenated, reduced in one all-reduce, and split into
           views.
           coalesced: changes `per_tensor`. All all-reduces are passed to NCCL as one group.
Bound      The host. So the page times ordinary calls, without a CUDA graph. `per_tensor` needs
           `count` calls and handshakes. `bucketed` moves the same bytes in one call. NVLink
           multicast was off (README), but would hardly matter, because the host is the limit. Half
           of the launches of `per_tensor` and nearly all launches of `coalesced` are copies of
           inputs. A training step does not need these copies, so `bucketed` gains less there than
           here.
Seen       Every side takes longer than predicted. A call of `all_reduce` takes the host longer than
           a launch, and peaks.json has no rate for such a call. `per_tensor` and `coalesced` differ
           only in how they call the all-reduces, but their times differ by several launches per
           all-reduce. We cannot explain why coalesced and `bucketed` take longer than predicted.
           CUDA graphs gave no answer: an all-reduce of this size took several times longer in a
           graph of many all-reduces than in a graph of few. We cannot explain that either.
Use when   Many gradients are smaller than a few MB. DDP and FSDP bucket gradients for you. Large
           gradients gain nothing, because the copy into the bucket takes longer than the calls that
           it saves.
"""

import torch
import torch.distributed as dist

from pytest_aisp import Conditions, Cost, Variant, Work, compare

from .wire_costs import all_reduce_of


def inputs(device, count, numel):
    return ([torch.randn(numel, device=device) for _ in range(count)],)


def reference(ranks):
    total = [sum(g.double() for g in same) for same in zip(*(g for (g,) in ranks), strict=True)]
    return [total] * len(ranks)


def per_tensor(grads):
    out = [g.clone() for g in grads]
    for g in out:
        dist.all_reduce(g)
    return out


def bucketed(grads):
    flat = torch.cat(grads)
    dist.all_reduce(flat)
    return list(flat.split([g.numel() for g in grads]))


def coalesced(grads):
    out = [g.clone() for g in grads]
    dist.all_reduce_coalesced(out)
    return out


def clones(count, numel):
    return Cost(read=4 * count * numel, write=4 * count * numel, launches=count)


def one_bucket(count, numel, world):
    joined = Cost(read=4 * count * numel, write=4 * count * numel, launches=1)
    return joined + all_reduce_of(4 * count * numel, world) + Cost(host_steps=count)


@compare(
    baseline=per_tensor,
    optimized=[
        Variant(bucketed, at_least={"sm90": 15.0}),
        Variant(coalesced, at_least={"sm90": 2.0}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"count": 128, "numel": 16384}],
    check_sizes=[{"count": 3, "numel": 17}],
    work=lambda count, numel: Work(wire=4 * count * numel, terms=2),
    bound="launch",
    costs={
        per_tensor: lambda count, numel, world: (
            clones(count, numel) + count * all_reduce_of(4 * numel, world)
        ),
        bucketed: one_bucket,
        coalesced: lambda count, numel, world: (
            clones(count, numel) + all_reduce_of(4 * count * numel, world)
        ),
    },
    conditions=Conditions(gpus=2),
)
def test_bucketed(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
