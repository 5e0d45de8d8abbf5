"""Training step as one CUDA graph: pay for the launches once.

Problem    One SGD step with momentum of a small MLP, at a batch too small to fill the GPU.
Baseline   eager: forward, backward and a foreach optimizer, some 40 launches a step.
Optimized  captured: the same kernels, replayed with one launch; the capture is paid once.
Bound      Launch: 40 x 5 us against the sum of the kernels' times.
"""

from types import SimpleNamespace

import torch
from torch.nn import functional as F

from pytest_aisp import Work, capture, compare

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
    state.optimizer.zero_grad(set_to_none=False)  # keeps the addresses that a graph needs
    F.cross_entropy(state.model(x), y).backward()
    state.optimizer.step()


def reference(state, x, y):
    state.model.double()
    step(state, x.double(), y)


def eager(state, x, y):
    step(state, x, y)


def captured(state, x, y):
    yield capture(lambda: step(state, x, y))


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
    at_least={"sm90": 4.5},
)
def test_train_step_graph(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
