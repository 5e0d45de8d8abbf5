"""Training step as one CUDA graph: the host launches once, not 36 times.

Problem    Take one SGD step with momentum on a small MLP. The batch is too small to fill the GPU.
Baseline   eager: forward, backward and a foreach optimizer, 36 launches per step. 12 of these
           launches zero the gradients and add to them. By default, torch frees the gradients, which
           would save these 12 launches on both sides.
Optimized  captured: changes `eager`. A CUDA graph is replayed with one launch. The time does not
           include the capture.
Bound      The host limits `eager`. The GPU limits `captured`, whose kernels run one after another.
Seen       Both sides take longer than predicted. The cost of eager counts launches and calls that
           create a tensor. This cost leaves out the Python code of the modules and the optimizer,
           and the bookkeeping of autograd. `forward_graph_test.py` has no modules, optimizer or
           autograd, and its eager side takes the predicted time. We did not measure how much time
           modules, optimizer and autograd take. The cost of captured counts the starts of its 36
           kernels, and assumes that bytes and FLOPs run at the rates of a full GPU. But products of
           64 rows leave most SMs idle. We did not time the kernels of captured individually.
Use when   A training step repeats with the same shapes and the host is the limit. Gradients must
           keep their addresses: zero them in place, or free them inside the graph, as
           `together_test.py` does. Do not capture a step that waits for the GPU, for example in
           `.item()`.
"""

from types import SimpleNamespace

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Work, capture, compare

BATCH, CLASSES = 64, 10


def state(device, width):
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width),
        torch.nn.GELU(),
        torch.nn.Linear(width, width),
        torch.nn.GELU(),
        torch.nn.Linear(width, CLASSES),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return SimpleNamespace(model=model, optimizer=optimizer)


def inputs(device, width):
    labels = torch.randint(CLASSES, (BATCH,), device=device)
    return torch.randn(BATCH, width, device=device), labels


def step(state, x, y):
    state.optimizer.zero_grad(set_to_none=False)  # so that gradients keep their addresses
    F.cross_entropy(state.model(x), y).backward()
    state.optimizer.step()


def reference(state, x, y):
    state.model.double()
    step(state, x.double(), y)


def eager(state, x, y):
    step(state, x, y)


def captured(state, x, y):
    yield capture(lambda: step(state, x, y))


def one_step(width, launches, host_steps):
    """Return the cost of a step. All its data stays in the L2."""
    ops = {"fp32": 6 * BATCH * width * (2 * width + CLASSES)}
    return Cost(ops=ops, launches=launches, host_steps=host_steps)


@compare(
    baseline=eager,
    optimized=[captured],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"width": 512}],
    check_sizes=[{"width": 33}],
    work=lambda width: Work(
        flops={"fp32": 6 * BATCH * width * (2 * width + CLASSES)}, terms=width, roundings=8
    ),
    bound="launch",
    costs={
        # Launches: 6 to zero gradients, 7 forward, 20 backward, 3 to update. Host steps: 21 results
        # of kernels, and 25 views and flags.
        eager: lambda width: one_step(width, launches=36, host_steps=46),
        captured: lambda width: one_step(width, launches=1, host_steps=0) + Cost(graph_nodes=36),
    },
    at_least={"sm90": 4.5},
)
def test_train_step_graph(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
