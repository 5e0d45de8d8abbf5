"""Overlapped reduction: reduce a layer's gradient while backward computes the next gradient.

Problem    Compute the gradients of an MLP of `layers` square bf16 layers, averaged over the ranks.
           All ranks have the same weights, and each rank has its own batch.
Baseline   after_backward: first the whole backward, then one all-reduce per layer, one after
           another.
Optimized  per_layer: a hook starts a layer's all-reduce as soon as the layer's gradient exists.
           prioritized: changes `per_layer`. The stream of the process group has high priority, so
           NCCL's kernels can start before a running product has started all its blocks.
           bucketed: changes `per_layer`. The gradients of 4 layers are concatenated and reduced as
           one.
           copied: changes `per_layer`. Copy engines move the gradients in symmetric memory
           ([copy_engines](copy_engines.py)). The SMs only add.
           ddp: torch's DistributedDataParallel, which reduces buckets of 25 MiB during backward.
Bound      NVLink, which the products of backward can hide. A layer's all-reduce and its part of
           backward take about the same time. So at best, a call takes only as long as forward,
           backward and a single all-reduce. `bucketed` also copies gradients into buckets, which
           pays off only if layers are smaller than here. NVLink multicast was off (README). With
           four GPUs or more, multicast could shorten NCCL's all-reduces.
Seen       On two GPUs, every side takes longer than predicted. The prediction uses the rate of an
           all-reduce of 512 MiB. A layer has 32 MiB and a bucket has 128 MiB, and NCCL is slower at
           these sizes (see the README's plot). At the plot's rates, `after_backward` is within
           about 5 % of its prediction. The sides that overlap NCCL's all-reduces still take about a
           tenth longer than predicted. `copied`, which does not use NCCL, takes a quarter longer.
           On all of these sides, products and reductions slow each other down. The README's table
           for `copied` shows that products hide only part of the sums and take longer while sums
           run. Neither a high priority nor fewer NCCL channels helped. All sides were timed as CUDA
           graphs, except `ddp`, which cannot be captured. Without a graph, `bucketed` is the
           fastest side, and `copied` is slower than `after_backward`, because `copied` makes
           several host calls per layer. On four GPUs, `bucketed` gains as much as on two, and
           `per_layer` and `prioritized` gain a little less. `copied`, the fastest side on two GPUs,
           gains nothing on four, even in a graph. At the link rates of two GPUs, the predicted time
           of `copied` is less than two thirds of the measured time. On four GPUs, each sum takes
           three copies in and three copies out, one after another, and each share is half as large.
           We did not measure which part takes so long: the copies, the additions or the barriers.
           `ddp` takes longer than `after_backward` on four GPUs, but the interval of its speedup
           includes 1. Only `ddp` is timed as an ordinary call. As an ordinary call on four GPUs,
           `per_layer` takes almost twice as long as in a graph, and would also be slower than
           `after_backward`. So ddp probably does not gain because of the host's work for hooks and
           calls.
Use when   Always overlap the reduction with backward in data-parallel training. DDP already does
           this, but measure it: on four GPUs, it gains nothing here. Use copy engines only in a
           CUDA graph, and only on two GPUs.
"""

import functools
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from pytest_aisp import Conditions, Cost, Variant, Work, compare

from .copy_engines import CopiedSums
from .wire_costs import all_reduce_of, all_reduced, copied_sum

BATCH, BUCKET = 1024, 4


def state(device, layers, width):
    make = {"device": device, "dtype": torch.bfloat16}
    linears = [torch.nn.Linear(width, width, bias=False, **make) for _ in range(layers)]
    for linear in linears:
        torch.nn.init.normal_(linear.weight, std=1 / width**0.5)
    parts = [part for linear in linears for part in (linear, torch.nn.Tanh())]
    return SimpleNamespace(model=torch.nn.Sequential(*parts))


def inputs(device, layers, width):
    """Return a batch, and the gradient of the loss with respect to the model's output."""
    return tuple(torch.randn(BATCH, width, device=device).bfloat16() for _ in range(2))


def gradients(weights, x, dy, hook=None):
    """Return the gradients of `weights`, and call `hook` with each weight that has its gradient."""
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
    """Return a group of all ranks with a high-priority stream. A process creates it once."""
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


def forward_of(layers, width):
    product = Cost(
        read=2 * width**2, ops={"bf16": 2 * BATCH * width**2}, l2=4 * BATCH * width, launches=1
    )
    tanh = Cost(l2=4 * BATCH * width, launches=1)
    return layers * (product + tanh)


def backward_of(width, products=2, beside=None):
    """Return the cost of a layer's backward while work with the cost `beside` runs."""
    beside = beside or Cost()
    both = Cost(
        read=2 * width**2 + beside.read,
        write=2 * width**2 + beside.write,
        ops={"bf16": products * 2 * BATCH * width**2},
        sent=beside.sent,
        nccl=beside.nccl,
        launches=products + beside.launches,
    )
    return Cost(l2=6 * BATCH * width, launches=1) + both


def scaled_forward(layers, width):
    """Return the cost of dividing dy by the number of ranks, and of the forward pass."""
    return Cost(l2=4 * BATCH * width, launches=1) + forward_of(layers, width)


def overlapped(layers, width, beside, last):
    """Return the cost if `beside` runs during the backward of every layer except the last layer.

    Backward ends with the first layer. This layer needs no gradient of its input, and nothing hides
    the reduction of its weight's gradient.
    """
    return (
        scaled_forward(layers, width)
        + backward_of(width)
        + (layers - 2) * backward_of(width, beside=beside)
        + backward_of(width, products=1, beside=beside)
        + last
    )


def copy_of(nbytes):
    return Cost(read=nbytes, write=nbytes, launches=1)


def reduced_after(layers, width, world):
    gradients = (layers - 1) * backward_of(width) + backward_of(width, products=1)
    reductions = layers * all_reduce_of(2 * width**2, world)
    return scaled_forward(layers, width) + gradients + reductions


def reduced_by_layer(layers, width, world):
    last = all_reduce_of(2 * width**2, world)
    return overlapped(layers, width, beside=last, last=last)


def reduced_by_bucket(layers, width, world):
    nbytes = 2 * width**2
    bucket = all_reduce_of(BUCKET * nbytes, world)
    quarter = Cost(nccl=bucket.nccl / BUCKET, launches=1 / BUCKET)
    stacked = copy_of(BUCKET * nbytes)
    later = BUCKET * backward_of(width, beside=quarter) + stacked
    first_layers = (BUCKET - 1) * backward_of(width, beside=quarter)
    return (
        scaled_forward(layers, width)
        + BUCKET * backward_of(width)
        + stacked
        + (layers // BUCKET - 2) * later
        + first_layers
        + backward_of(width, products=1, beside=quarter)
        + stacked
        + bucket
    )


def summed_by_copies(layers, width, world):
    """Return the cost of a copy, two barriers, and one pull, add and push per other rank."""
    nbytes = 2 * width**2
    adds = 3 * (world - 1) * nbytes / world
    beside = Cost(
        read=nbytes + 2 / 3 * adds,
        write=nbytes + adds / 3,
        sent=all_reduced(nbytes, world),
        launches=3 * world,
    )
    last = copy_of(nbytes) + copied_sum(nbytes, world)
    return overlapped(layers, width, beside=beside, last=last)


def by_ddp(layers, width, world):
    """Return the cost with a copy of each gradient into its bucket, and a copy out after
    backward."""
    nbytes = 2 * width**2
    last = all_reduce_of(nbytes, world)
    beside = Cost(read=nbytes, write=nbytes, nccl=last.nccl, launches=2)
    last = copy_of(nbytes) + last + layers * copy_of(nbytes)
    return overlapped(layers, width, beside=beside, last=last)


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
    costs={
        after_backward: reduced_after,
        per_layer: reduced_by_layer,
        prioritized: reduced_by_layer,
        bucketed: reduced_by_bucket,
        copied: summed_by_copies,
        ddp: by_ddp,
    },
    conditions=Conditions(gpus=(2, 4)),
)
def test_overlapped(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
