"""Fully sharded data parallel: keep a share of parameters, gradients and momentum, not all of them.

Problem    A training step of an MLP of `layers` square fp32 layers on every rank's own batch: load
           the checkpoint, forward, backward, mean of the gradients over the ranks, SGD with
           momentum. Every rank returns its own rows of the new parameters. A call begins with the
           checkpoint, which is the state, so that a step's result can be told from the last one's.
Baseline   ddp: DistributedDataParallel; every rank holds and updates everything. Gradients are
           views of DDP's buckets, which saves a copy of them all.
Optimized  fsdp: `fully_shard` a layer: a rank holds rows / world of parameters, gradients and
           momentum; a layer's parameters are gathered when its turn comes, and freed after.
Bound      Memory is the point. 16 layers of 4096 x 4096 are 1 GiB. ddp holds parameters, buckets of
           gradients, momentum, and at last the rows that it returns, 3.5 GiB on two ranks. fsdp
           holds its share of the first three, 1.5 GiB; the gathered layers are gone when momentum
           comes, and gradients when rows are returned: 0.43 of ddp's, as two Gloo ranks show too.
           On four it is some 0.9 of 3.25, 0.28, with two layers gathered. Claimed is 0.55.
           Time, by the host's clock, since DDP's step cannot be captured in a graph: a layer at
           256 rows is 26 GFLOP, 0.52 ms at 50 TFLOP/s of fp32, 8.2 ms for all. ddp reduces 64 MiB a
           layer under that, 0.23 ms at 316 GB/s; fsdp gathers twice and scatters once, half as many
           bytes again, 0.3 ms. Loading and updating move 24 bytes a parameter, 1.5 ms, of which
           fsdp does its share. But a layer costs fsdp some 0.5 ms of Python, as long as its
           products take: no faster, if not slower.
Seen       Two H200s: 13.0 ms and 41, 0.32x (0.36x on another machine), as a layer costs fsdp 1.6 to
           2 ms of Python in those virtual machines; memory 3.5 GiB and 1.5, 0.43 as predicted.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pytest_aisp import Conditions, Variant, Work, compare

BATCH, RATE, MOMENTUM = 256, 0.5, 0.9


def state(device, layers, width):
    weights = torch.randn(layers, width, width, device=device) / width**0.5
    return SimpleNamespace(checkpoint=weights)


def inputs(device, layers, width):
    """Return a batch, and the gradient of the loss with respect to what becomes of it."""
    return tuple(torch.randn(BATCH, width, device=device) for _ in range(2))


def reference(states, ranks):
    world, found = len(ranks), []
    for one, (x, dy) in zip(states, ranks, strict=True):
        weights = one.checkpoint.double().requires_grad_()
        y = x.double()
        for weight in weights:
            y = torch.tanh(y @ weight.t())
        found.append(torch.autograd.grad(y, weights, dy.double())[0])
    stepped = states[0].checkpoint.double() - RATE * sum(found) / world
    own = [[part.clone() for part in weight.chunk(world)] for weight in stepped]
    return [list(rows) for rows in zip(*own, strict=True)]


def mlp(weights):
    layers, width, _ = weights.shape
    make = {"bias": False, "device": weights.device}
    linears = [torch.nn.Linear(width, width, **make) for _ in range(layers)]
    return torch.nn.Sequential(*(part for one in linears for part in (one, torch.nn.Tanh())))


def step(model, optimizer, x, dy):
    model(x).backward(dy)
    optimizer.step()
    optimizer.zero_grad()


def sgd(model):
    return torch.optim.SGD(model.parameters(), RATE, MOMENTUM)


def load(held, rows, optimizer):
    """Begin anew: put `rows` into the parameters that are `held`, and forget the momentum."""
    with torch.no_grad():
        torch._foreach_copy_(held, rows)
    optimizer.state.clear()


def ddp(state, x, dy):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(mlp(state.checkpoint), gradient_as_bucket_view=True)
    optimizer, parameters = sgd(model), list(model.parameters())

    def run():
        load(parameters, list(state.checkpoint), optimizer)
        step(model, optimizer, x, dy)
        return [parameter.detach().chunk(world)[rank].clone() for parameter in parameters]

    yield run


def fsdp(state, x, dy):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = mlp(state.checkpoint)
    mesh = DeviceMesh.from_group(dist.group.WORLD, x.device.type)
    for linear in model[::2]:
        fully_shard(linear, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, own = sgd(model), [p.to_local().detach() for p in model.parameters()]

    def run():
        rows = [weight.chunk(world)[rank] for weight in state.checkpoint]
        load(own, rows, optimizer)
        step(model, optimizer, x, dy)
        return [shard.clone() for shard in own]

    yield run


@compare(
    baseline=ddp,
    optimized=[Variant(fsdp, at_least="yardstick")],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 16, "width": 4096}],
    check_sizes=[{"layers": 3, "width": 17}, {"layers": 2, "width": 33}],
    work=lambda layers, width, world: Work(
        flops={"fp32": 6 * BATCH * layers * width**2},
        wire=2 * (world - 1) / world * 4 * layers * width**2,
        terms=max(width, BATCH),  # forward adds over the width, backward over the batch too
        roundings=2 * layers + 4,
    ),
    bound="host",
    conditions=Conditions(gpus=(2, 4)),
)
def test_fsdp(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
    pair.assert_memory(at_most=0.55)
