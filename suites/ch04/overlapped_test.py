"""Overlapped reduction: send a layer's gradient while backward computes the next one.

Problem    Gradients of an MLP of `layers` square bf16 layers, averaged over the ranks, which have
           the same weights and a batch each.
Baseline   after_backward: backward first, then an all-reduce a layer, one after the other.
Optimized  per_layer: a hook starts a layer's all-reduce as soon as its gradient is there.
           bucketed: as per_layer, but gradients of 4 layers are concatenated and reduced as one.
           prioritized: as per_layer, by a process group whose stream has priority, so that NCCL's
           kernels need not wait until a product has started all of its blocks.
           copied: as per_layer, but copy engines move the gradients, in symmetric memory
           ([copy_engines](copy_engines.py)); processors only add.
           ddp: torch's DistributedDataParallel, which does this in buckets of 25 MiB.
Bound      NVLink, hidden behind the tensor cores. A layer of 4096 x 4096 at a batch of 1024 rows is
           34 GFLOP forward and 69 backward, 0.05 and 0.09 ms at 750 TFLOP/s; its gradient of
           32 MiB takes 0.02 + 0.11 ms at 316 GB/s. Sixteen layers: 0.73 + 1.47 + 2.0 = 4.2 ms one
           after the other. per_layer: 0.73 + 0.09 + 2.0 = 2.8 ms, as communication is the longer
           one: 1.5 times. bucketed sends 4 messages, 1.76 ms, of which the first leaves after 4
           layers; its copies take 0.03 ms a layer from backward: 0.73 + 0.37 + 1.76 = 2.9 ms, no
           better at layers of this size, and worth its copies where layers are small. NCCL's
           kernels take processors from the products, so less will be seen of all this. copied
           moves 16 MiB in each direction twice a layer, 0.09 ms at 383 GB/s, and besides copies in,
           adds and waits for two barriers, some 0.04 ms, which the other stream's copies hide: 16
           layers take 1.5 to 2.0 ms and no processor but for the additions, 2.4 to 2.9 ms in all.
Seen       Two H200s: after_backward 4.78 ms, per_layer 1.35x, bucketed 1.27x. Of 2.2 ms of
           reduction (0.14 a layer by itself) 1.2 are hidden, 55 %; the rest is what products lose
           to NCCL's kernels, and the first layer's reduction, which nothing hides; prioritized is
           no better (1.36x), nor are fewer channels. copied 1.55x, 3.2 ms: of 1.7 ms of sums 0.9
           are hidden; forward and backward take 3.0 ms instead of 2.5 meanwhile. As called it
           loses, at 6.8 ms: six launches a layer are the host's. As called bucketed wins (4.1 ms
           against 4.8): its four messages cost the host less than sixteen. DDP cannot be captured,
           and is 1.0 to 1.1 times as fast as called. In ranks that had served other pages bucketed
           was once seen at 4.5 ms; fresh ranks did not confirm it.
"""

import functools
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from pytest_aisp import Conditions, Variant, Work, compare

from .copy_engines import CopiedSums

BATCH, BUCKET = 1024, 4


def state(device, layers, width):
    make = {"device": device, "dtype": torch.bfloat16}
    linears = [torch.nn.Linear(width, width, bias=False, **make) for _ in range(layers)]
    for linear in linears:
        torch.nn.init.normal_(linear.weight, std=1 / width**0.5)
    parts = [part for linear in linears for part in (linear, torch.nn.Tanh())]
    return SimpleNamespace(model=torch.nn.Sequential(*parts))


def inputs(device, layers, width):
    """Return a batch, and the gradient of the loss with respect to what becomes of it."""
    return tuple(torch.randn(BATCH, width, device=device).bfloat16() for _ in range(2))


def gradients(weights, x, dy, hook=None):
    """Return the gradients of `weights`; `hook` is called with each weight that has got its own."""
    leaves = [weight.detach().requires_grad_() for weight in weights]
    for leaf in leaves if hook is not None else ():
        leaf.register_post_accumulate_grad_hook(hook)
    for leaf in leaves:
        x = torch.tanh(F.linear(x, leaf))
    x.backward(dy)
    return [leaf.grad for leaf in leaves]


def reference(states, ranks):
    world = len(ranks)
    found = []
    for one, (x, dy) in zip(states, ranks, strict=True):
        weights = [weight.double() for weight in one.model.parameters()]
        found.append(gradients(weights, x.double(), dy.double()))
    mean = [sum(same) / world for same in zip(*found, strict=True)]
    return [mean] * world


def after_backward(state, x, dy):
    found = gradients(state.model.parameters(), x, dy / dist.get_world_size())
    for gradient in found:
        dist.all_reduce(gradient)
    return found


def per_layer(state, x, dy, group=None):
    works = []

    def hook(weight):
        works.append(dist.all_reduce(weight.grad, group=group, async_op=True))

    found = gradients(state.model.parameters(), x, dy / dist.get_world_size(), hook)
    for work in works:
        work.wait()
    return found


@functools.cache
def urgent():
    """Return a group of all ranks, whose stream has priority; one a process, never ended."""
    return dist.new_group(pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True))


def prioritized(state, x, dy):
    group = urgent()
    yield lambda: per_layer(state, x, dy, group)


def copied(state, x, dy):
    weights = list(state.model.parameters())
    sums = CopiedSums(len(weights), weights[0].shape, x)

    def run():
        begun = iter(range(len(weights) - 1, -1, -1))  # the last layer is first
        found = gradients(
            weights,
            x,
            dy / dist.get_world_size(),
            lambda weight: sums.start(next(begun), weight.grad),
        )
        sums.wait()
        del found
        return list(sums.mine)

    yield run


def bucketed(state, x, dy):
    weights = list(state.model.parameters())
    ready, buckets, works = [], [], []

    def hook(weight):
        ready.append(weight.grad)
        if len(ready) % BUCKET == 0 or len(ready) == len(weights):
            buckets.append(torch.stack(ready[len(buckets) * BUCKET :]))
            works.append(dist.all_reduce(buckets[-1], async_op=True))

    gradients(weights, x, dy / dist.get_world_size(), hook)
    for work in works:
        work.wait()
    return [gradient for bucket in buckets for gradient in bucket][::-1]  # the last layer is first


def ddp(state, x, dy):
    model = DistributedDataParallel(state.model)

    def step():
        model(x).backward(dy)
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad(set_to_none=True)
        return found

    yield step


@compare(
    baseline=after_backward,
    optimized=[
        per_layer,
        Variant(prioritized, gpu_only="a stream's priority"),
        bucketed,
        Variant(copied, gpu_only="symmetric memory", at_least={"sm90": 1.35}),
        Variant(ddp, at_least="yardstick"),
    ],
    at_least={"sm90": 1.15},
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 16, "width": 4096}],
    check_sizes=[{"layers": 5, "width": 17}, {"layers": 16, "width": 33}],
    work=lambda layers, width, world: Work(
        flops={"bf16": 2 * BATCH * (3 * layers - 1) * width**2},  # x has no gradient
        wire=2 * (world - 1) / world * 2 * layers * width**2,
        terms=BATCH,
        roundings=2 * layers + 2,
    ),
    bound="nvlink",
    conditions=Conditions(gpus=(2, 4)),
)
def test_overlapped(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
