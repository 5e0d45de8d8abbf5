"""Fully sharded data parallel: keep a share of parameters, gradients and momentum, not all of them.

Problem    A training step of an MLP of `layers` square fp32 layers on every rank's own batch: load
           the checkpoint, forward, backward, mean of the gradients over the ranks, SGD with
           momentum. Every rank returns its own rows of the new parameters. The checkpoint holds
           parameters and momentum. It is the page's state, and each call begins by loading it.
Baseline   ddp: DistributedDataParallel. Every rank holds and updates everything. Gradients are
           views of DDP's buckets, which saves a copy of them all.
Optimized  fsdp: `fully_shard` on each layer instead. A rank holds rows / world of parameters,
           gradients and momentum. A layer's parameters are gathered before they are used, and freed
           after.
Bound      The CUDA cores' products in ddp, and the host in fsdp. The page is about memory. 16
           layers of 4096 x 4096 are 1 GiB. On two ranks, ddp holds parameters, buckets of
           gradients, momentum and at last half of them as returned rows, 3.5 GiB. fsdp holds half
           of the first three, 1.5 GiB, and in backward also three or four layers of 64 MiB: the
           gathered layer, the next one, and a gradient on its way to the other ranks. That is half
           of ddp's memory.
Seen       In an earlier form, whose update had no momentum, fsdp was far slower than predicted. Its
           host runs Python hooks before and after each layer. The cost counts launches, but not the
           time of the hooks. We did not measure how long they take.
Use when   Parameters, gradients and optimizer state do not fit on one GPU. If they fit, DDP is
           faster, unless a layer's products take longer than its hooks.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pytest_aisp import Conditions, Cost, Variant, Work, compare

BATCH, RATE, MOMENTUM = 256, 0.5, 0.9


def state(device, layers, width):
    weights = torch.randn(layers, width, width, device=device) / width**0.5
    momentum = torch.randn(layers, width, width, device=device) / width**0.5
    return SimpleNamespace(checkpoint=weights, momentum=momentum)


def inputs(device, layers, width):
    """Return a batch, and the gradient of the loss with respect to the model's output."""
    return tuple(torch.randn(BATCH, width, device=device) for _ in range(2))


def reference(states, ranks):
    world, found = len(ranks), []
    for one, (x, dy) in zip(states, ranks, strict=True):
        weights = one.checkpoint.double().requires_grad_()
        y = x.double()
        for weight in weights:
            y = torch.tanh(y @ weight.t())
        found.append(torch.autograd.grad(y, weights, dy.double())[0])
    momentum = MOMENTUM * states[0].momentum.double() + sum(found) / world
    stepped = states[0].checkpoint.double() - RATE * momentum
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
    """Return SGD in the middle of training, and its momentum of each parameter."""
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
    buffers = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for parameter, buffer in zip(model.parameters(), buffers, strict=True):
        optimizer.state[parameter]["momentum_buffer"] = buffer
    return optimizer, buffers


def load(held, rows):
    with torch.no_grad():
        torch._foreach_copy_(held, rows)


def ddp(state, x, dy):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(mlp(state.checkpoint), gradient_as_bucket_view=True)
    parameters = list(model.parameters())
    optimizer, momentum = sgd(model)

    def run():
        load(parameters + momentum, [*state.checkpoint, *state.momentum])
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
    own = [p.to_local().detach() for p in model.parameters()]
    optimizer, buffers = sgd(model)
    momentum = [buffer.to_local() for buffer in buffers]

    def run():
        whole = [*state.checkpoint, *state.momentum]
        load(own + momentum, [one.chunk(world)[rank] for one in whole])
        step(model, optimizer, x, dy)
        return [shard.clone() for shard in own]

    yield run


def loading(weights):
    """Return the cost of copying parameters and momentum."""
    return 2 * Cost(read=4 * weights, write=4 * weights, launches=1)


def updating(weights):
    """Return the cost of SGD: scale the momentum, add the gradient, update the parameters."""
    added = Cost(read=8 * weights, write=4 * weights, launches=1)
    return Cost(read=4 * weights, write=4 * weights, launches=1) + added + added


def ddp_cost(layers, width, world):
    weights = layers * width**2
    forward = Cost(ops={"fp32": 2 * BATCH * weights}, launches=2 * layers)
    backward = Cost(  # an all-reduce a layer meanwhile
        ops={"fp32": 4 * BATCH * weights},
        nccl=2 * (world - 1) / world * 4 * weights,
        launches=4 * layers,
    )
    divided = Cost(read=4 * weights, write=4 * weights, launches=layers)
    returned = Cost(read=4 * weights / world, write=4 * weights / world, launches=layers)
    return loading(weights) + forward + backward + divided + updating(weights) + returned


def fsdp_cost(layers, width, world):
    weights = layers * width**2
    own, away = weights / world, (world - 1) / world * 4 * weights
    forward = Cost(  # a gather meanwhile, with a copy into its buffer and one out of it
        read=4 * (own + weights),
        write=4 * (own + weights),
        ops={"fp32": 2 * BATCH * weights},
        nccl=away,
        launches=5 * layers,
    )
    backward = Cost(  # another gather, and a scatter of the gradients, copied into its buffer
        read=4 * (own + 2 * weights),
        write=4 * (own + 2 * weights),
        ops={"fp32": 4 * BATCH * weights},
        nccl=2 * away,
        launches=9 * layers,
    )
    returned = Cost(read=4 * own, write=4 * own, launches=layers)
    return loading(own) + forward + backward + updating(own) + returned


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
    costs={ddp: ddp_cost, fsdp: fsdp_cost},
    conditions=Conditions(gpus=(2, 4)),
)
def test_fsdp(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
    pair.assert_memory(at_most=0.55)
