"""The chapter on one training step: one batch, fused optimizer, no sync, one graph.

Problem    One SGD step with momentum on the mean loss of 256 rows, MLP of 4 linear layers, fp32.
           Every side takes the same step and returns the same loss, on the device.
Baseline   first_draft: 8 micro-batches of 32 rows, `loss.item()` after each for the log, the
           default optimizer (foreach on a GPU). 8 x 29 launches, 56 to accumulate, 3 to update, and
           8 times the GPU runs dry: 292 x 6 us + 8 x 20 us = 1.9 ms.
Optimized  Each on top of the one before.
           fused_batch: all rows in one pass. 31 launches, one sync, 0.27 ms with Python's part: 7x.
           fused_optimizer: the update in one launch instead of 3, no lists made for it: 7.5x.
           no_item: the loss stays where it is until somebody reads it. No sync: 8x.
           captured: the step as one CUDA graph. What its 28 kernels take, 0.14 ms: 14x.
Bound      Launch: the host limits every rung but the last, which its kernels do.
"""

from types import SimpleNamespace

import torch
from torch.nn import functional as F

from pytest_aisp import Variant, Work, capture, compare

ROWS, MICRO, CLASSES = 256, 32, 10


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
    state.fused.state = state.default.state  # compared whichever optimizer a side uses
    return loss


def first_draft(state, x, y):
    state.default.zero_grad()
    logged = 0.0
    for rows, labels in zip(x.split(MICRO), y.split(MICRO), strict=True):
        loss = F.cross_entropy(state.model(rows), labels) * (MICRO / ROWS)
        loss.backward()
        logged += loss.item()
    state.default.step()
    return torch.full((), logged, device=x.device)


def fused_batch(state, x, y):
    logged = step(state.model, state.default, x, y).item()
    return torch.full((), logged, device=x.device)


def fused_optimizer(state, x, y):
    logged = step(state.model, state.fused, x, y).item()
    return torch.full((), logged, device=x.device)


def no_item(state, x, y):
    return step(state.model, state.fused, x, y)


def captured(state, x, y):
    yield capture(lambda: step(state.model, state.fused, x, y))


@compare(
    baseline=first_draft,
    optimized=[
        Variant(fused_batch, at_least={"sm90": 4.0, "cpu": 2.8}),
        Variant(fused_optimizer, at_least={"sm90": 4.5, "cpu": 3.0}),
        Variant(no_item, at_least={"sm90": 5.0, "cpu": 3.0}),
        Variant(captured, at_least={"sm90": 8.0}, when=lambda width: width >= 512),  # no CPU case
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
)
def test_together(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
