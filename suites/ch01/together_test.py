"""This chapter's ideas in one training step: the CUDA graph gives nearly all of the gain.

Problem    Take one SGD step with momentum on the mean loss of 256 rows, for an fp32 MLP of 4 linear
           layers. Every side takes the same step and returns the same loss, on the GPU.
Baseline   first_draft: the whole batch at once, the default optimizer (foreach on a GPU), and
           `.item()` after the step for the log. A step takes 31 launches and one wait for the GPU.
Optimized  fused_optimizer: changes `first_draft`. The update takes one launch instead of three.
           no_item: changes `fused_optimizer`. The loss stays on the GPU. So the host does not wait
           for the loss, and does not launch a kernel to write it back to the GPU.
           captured: changes `no_item`. The step is one CUDA graph.
Bound      The host on every side except captured: Python, autograd and launches take longer than
           the kernels. `captured` has a single launch, so the limit is the GPU, which runs the 28
           kernels one after another.
Seen       On an H200, `captured` is more than ten times as fast as `first_draft`. `fused_optimizer`
           and `no_item` are not measurably faster than `first_draft`: the differences are smaller
           than the noise of the host's time. All sides take longer than predicted: the first three
           about six times as long, and captured nearly four times. The costs of the first three
           sides count launches, calls that create a tensor, and the wait. The costs leave out the
           Python code of the modules and the optimizer, and the bookkeeping of autograd. These
           parts matter: on a CPU at width 8, where kernels do little, a step takes as long as
           several hundred calls of `Tensor.view`. We did not measure how much time each part takes.
           The cost of captured counts the starts of its 28 kernels, and assumes that bytes and
           FLOPs run at the rates of a full GPU. But a product of 256 x 512 has too few tiles for
           132 SMs. We did not time the kernels of captured individually.
Use when   A step is so small that the host is the limit: capture it. `fused_optimizer` and
           `no_item` gain little by themselves, but `captured` needs `no_item`, because a CUDA graph
           cannot contain a wait. Larger steps keep the GPU busy while the host launches, so they
           gain little. `microbatch_test.py` shows how much time splitting the batch costs.
"""

from types import SimpleNamespace

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, capture, compare

ROWS, CLASSES = 256, 10
HOST_STEPS = 27 + 34  # results of kernels and views in a step


def state(device, width):
    hidden = [m for _ in range(3) for m in (torch.nn.Linear(width, width), torch.nn.GELU())]
    model = torch.nn.Sequential(*hidden, torch.nn.Linear(width, CLASSES)).to(device)
    default = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    fused = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    return SimpleNamespace(model=model, default=default, fused=fused)


def inputs(device, width):
    labels = torch.randint(CLASSES, (ROWS,), device=device)
    return torch.randn(ROWS, width, device=device), labels


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def reference(state, x, y):
    loss = step(state.model.double(), state.default, x.double(), y)
    state.fused.state = state.default.state  # the check compares both
    return loss


def first_draft(state, x, y):
    logged = step(state.model, state.default, x, y).item()
    return torch.full((), logged, device=x.device)


def fused_optimizer(state, x, y):
    logged = step(state.model, state.fused, x, y).item()
    return torch.full((), logged, device=x.device)


def no_item(state, x, y):
    return step(state.model, state.fused, x, y)


def captured(state, x, y):
    yield capture(lambda: step(state.model, state.fused, x, y))


def one_step(width, launches, host_steps):
    """Return the cost of a step. All its data stays in the L2."""
    ops = {"fp32": 2 * ROWS * width * (8 * width + 3 * CLASSES)}
    return Cost(ops=ops, launches=launches, host_steps=host_steps)


def logged_step(width, launches):
    """Return the cost of a step, of reading its loss, and of copying the loss back to the GPU."""
    fetched = one_step(width, launches, HOST_STEPS) + Cost(syncs=1)
    return fetched + Cost(launches=1, host_steps=1)


@compare(
    baseline=first_draft,
    optimized=[
        Variant(fused_optimizer, at_least="neutral"),
        Variant(no_item, at_least="neutral"),
        Variant(captured, at_least={"sm90": 4.0}, when=lambda width: width >= 512),  # no CPU case
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"width": 512}],
    check_sizes=[{"width": 33}],
    cpu_sizes=[{"width": 64}],
    work=lambda width: Work(
        flops={"fp32": 2 * ROWS * width * (8 * width + 3 * CLASSES)},
        terms=max(width, ROWS),
        roundings=16,
    ),
    bound="launch",
    costs={
        # Launches: 9 forward, 18 backward, 3 or 1 to update.
        first_draft: lambda width: logged_step(width, launches=30),
        fused_optimizer: lambda width: logged_step(width, launches=28),
        no_item: lambda width: one_step(width, launches=28, host_steps=HOST_STEPS),
        captured: lambda width: one_step(width, launches=1, host_steps=0) + Cost(graph_nodes=28),
    },
)
def test_together(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
