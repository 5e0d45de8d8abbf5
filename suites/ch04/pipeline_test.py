"""Pipeline schedules: 1F1B saves memory, interleaving shortens the bubble.

Problem    Gradients of a bf16 MLP whose blocks of 2 layers are spread over the ranks, two a rank;
           rank 0 has the batch, the last rank the targets, and there are twice as many
           microbatches as ranks. Each rank returns the gradients of its own blocks. Interleaving
           has other blocks on a rank: in test_pipeline_interleaved all ranks gather all gradients,
           on both sides alike.
Baseline   gpipe: all microbatches forward, then all backward; a rank's two blocks are neighbours.
           gpipe_gathered: the same, and gathers.
Optimized  one_forward_one_backward: 1F1B; a microbatch's backward comes before later forwards.
           interleaved: 1F1B where rank r has blocks r and r + world: each goes round twice.
Bound      Tensor cores, and the bubble, in which a rank has nothing to do. A microbatch of 4096
           rows takes a rank's 4 layers of 4096 x 4096 1.65 TFLOP, 2.2 ms at 750 TFLOP/s; what one
           rank sends the next is 32 MiB, 0.1 ms. m microbatches on p ranks take m + p - 1 such
           times, by 1F1B too, which is neutral: memory is its point, as rank r keeps activations of
           p - r microbatches, and gpipe of all m. With v blocks a rank they take
           m + (p - 1) / v: 4.5 instead of 5 on two ranks, 9.5 instead of 11 on four. Gathering
           128 MiB from each rank takes 0.4 ms on two and 1.1 on four: 11.4 ms against 10.3, 1.11
           times, and 25.3 against 22.0, 1.15 times. A microbatch costs the host some 0.3 ms of
           Python a block, whose products take 1.1.
Seen       Two H200s: gpipe 13.1 ms, one_forward_one_backward the same (1.00x) in 640 MiB instead of
           864. interleaved loses: 0.96x. A schedule waits for each transfer that it begins, some
           0.12 ms, and interleaving has 16 more of them: 1.9 ms, where the bubble that it saves is
           1.1 ms long. It wants microbatches that compute for longer than these.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.nn import functional as F

from pytest_aisp import Conditions, Work, compare

LAYERS, BLOCKS = 2, 2  # layers a block, blocks a rank


def microbatches(world):
    return 2 * world


def block(width, device):
    make = {"device": device, "dtype": torch.bfloat16}
    linears = [torch.nn.Linear(width, width, bias=False, **make) for _ in range(LAYERS)]
    for linear in linears:
        torch.nn.init.normal_(linear.weight, std=1 / width**0.5)
    return torch.nn.Sequential(*(part for linear in linears for part in (linear, torch.nn.Tanh())))


def state(device, rows, width, world):
    return SimpleNamespace(blocks=[block(width, device) for _ in range(BLOCKS * world)])


def inputs(device, rows, width, world):
    """Return a batch, which only rank 0 uses, and targets, which only the last rank uses."""
    shape = microbatches(world) * rows, width
    return tuple(torch.randn(shape, device=device).bfloat16() for _ in range(2))


def all_gradients(states, ranks):
    """Return the gradients of every block, by block."""
    model = torch.nn.Sequential(*states[0].blocks).double()
    loss = F.mse_loss(model(ranks[0][0].double()), ranks[-1][1].double())
    return torch.autograd.grad(loss, list(model.parameters()))


def reference(states, ranks):
    found, own = all_gradients(states, ranks), LAYERS * BLOCKS
    return [found[rank * own : (rank + 1) * own] for rank in range(len(ranks))]


def reference_gathered(states, ranks):
    return [all_gradients(states, ranks)] * len(ranks)


def stages(groups, placed, x):
    """Return this rank's stages: `groups` of blocks, of which it has those numbered `placed`."""
    parts = x.chunk(microbatches(dist.get_world_size()))
    given = torch.empty_like(parts[0], device="meta")
    passed = given.clone().requires_grad_()
    return [
        PipelineStage(
            torch.nn.Sequential(*groups[number]),
            number,
            len(groups),
            x.device,
            input_args=passed if number else given,
            output_args=passed,
        )
        for number in placed
    ]


def gradients(schedule, blocks, x, y):
    """Run `schedule`; return the gradients of `blocks`, and leave none behind."""
    first, last = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
    schedule.step(*[x] * first, target=y if last else None, return_outputs=False)
    found = []
    for parameter in (p for block in blocks for p in block.parameters()):
        found.append(parameter.grad)
        parameter.grad = None
    return found


def gathered(own, order):
    """Return the gradients of all ranks' blocks; the k-th that is gathered is block order[k]."""
    mine = torch.stack(own)
    everyone = mine.new_empty(dist.get_world_size() * len(mine), *mine.shape[1:])
    dist.all_gather_into_tensor(everyone, mine)
    by_block = dict(zip(order, everyone.split(LAYERS), strict=True))
    return [gradient for number in sorted(by_block) for gradient in by_block[number]]


def neighbours(state):
    """Return the blocks by rank: those of a rank follow each other."""
    return [state.blocks[at : at + BLOCKS] for at in range(0, len(state.blocks), BLOCKS)]


def scheduled(schedule, state, x, y):
    """Return a step of `schedule` with neighbouring blocks on this rank, as one stage."""
    rank, groups = dist.get_rank(), neighbours(state)
    (stage,) = stages(groups, [rank], x)
    made = schedule(stage, microbatches(dist.get_world_size()), F.mse_loss)
    return lambda: gradients(made, groups[rank], x, y)


def gpipe(state, x, y):
    yield scheduled(ScheduleGPipe, state, x, y)


def one_forward_one_backward(state, x, y):
    yield scheduled(Schedule1F1B, state, x, y)


def gpipe_gathered(state, x, y):
    step = scheduled(ScheduleGPipe, state, x, y)
    yield lambda: gathered(step(), range(len(state.blocks)))


def interleaved(state, x, y):
    rank, world, count = dist.get_rank(), dist.get_world_size(), len(state.blocks)
    groups, placed = [[block] for block in state.blocks], range(rank, count, world)
    placed_stages = stages(groups, placed, x)
    schedule = ScheduleInterleaved1F1B(placed_stages, microbatches(world), F.mse_loss)
    own = state.blocks[rank::world]
    order = [number for first in range(world) for number in range(first, count, world)]
    yield lambda: gathered(gradients(schedule, own, x, y), order)


def work(rows, width, world):
    layers, parts = LAYERS * BLOCKS, microbatches(world)
    return Work(
        flops={"bf16": 6 * parts * rows * layers * width**2},
        wire=2 * parts * rows * width,
        terms=parts * rows,
        roundings=2 * layers * world + parts,
    )


@compare(
    baseline=gpipe,
    optimized=[one_forward_one_backward],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 4096, "width": 4096}],
    check_sizes=[{"rows": 5, "width": 17}],
    work=work,
    bound="tensor",
    at_least="neutral",
    conditions=Conditions(gpus=(2, 4)),
)
def test_pipeline(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
    pair.assert_memory(at_most=0.8)


@compare(
    baseline=gpipe_gathered,
    optimized=[interleaved],
    state=state,
    inputs=inputs,
    reference=reference_gathered,
    sizes=[{"rows": 4096, "width": 4096}],
    check_sizes=[{"rows": 5, "width": 17}],
    work=work,
    bound="tensor",
    conditions=Conditions(gpus=(2, 4)),
    at_least="yardstick",
)
def test_pipeline_interleaved(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
