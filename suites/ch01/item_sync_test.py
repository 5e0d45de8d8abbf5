"""Losses of an evaluation: do not wait for each one.

Problem    Evaluate a linear classifier on `steps` batches that come one at a time; return the loss
           of every batch on the host, as for a log.
Baseline   every_step: `.item()` after each batch. The host waits until the GPU has nothing to do,
           and the GPU then waits until the host has launched again.
Optimized  every_sixteenth: losses stay on the GPU and are fetched 16 at a time.
           at_the_end: fetched once.
Bound      Host: a batch is 3 launches, some 20 us of Python. To drain the queue, copy 4 bytes and
           fill the queue again takes 20 us more: 2.0 times, and 1.9 where one batch in 16 pays.
           Under kernels of milliseconds the same 20 us would not be seen.
"""

import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from pytest_aisp import Work, compare

CLASSES = 64


def inputs(device, steps, batch, width):
    features = torch.randn(steps, batch, width, device=device)
    labels = torch.randint(CLASSES, (steps, batch), device=device)
    return features, labels, torch.randn(width, CLASSES, device=device) / width**0.5


def reference(features, labels, weight):
    logits = features.double() @ weight.double()
    chosen = logits.gather(2, labels.unsqueeze(2)).squeeze(2)
    return (logits.logsumexp(dim=2) - chosen).mean(dim=1).cpu()


def every_step(features, labels, weight):
    losses = []
    for x, y in zip(features, labels, strict=True):
        losses.append(F.cross_entropy(x @ weight, y).item())
    return torch.tensor(losses)


def every_sixteenth(features, labels, weight):
    losses, waiting = [], []
    for x, y in zip(features, labels, strict=True):
        waiting.append(F.cross_entropy(x @ weight, y))
        if len(waiting) == 16:
            losses += torch.stack(waiting).tolist()
            waiting.clear()
    losses += torch.stack(waiting).tolist() if waiting else []
    return torch.tensor(losses)


def at_the_end(features, labels, weight):
    losses = []
    for x, y in zip(features, labels, strict=True):
        losses.append(F.cross_entropy(x @ weight, y))
    return torch.tensor(torch.stack(losses).tolist())


@compare(
    baseline=every_step,
    optimized=[every_sixteenth, at_the_end],
    inputs=inputs,
    reference=reference,
    sizes=[{"steps": 64, "batch": 256, "width": 512}],
    check_sizes=[
        {"steps": 37, "batch": 5, "width": 33},
        {"steps": st.integers(1, 40), "batch": st.integers(1, 9), "width": st.integers(1, 40)},
    ],
    work=lambda steps, batch, width: Work(
        read=4 * steps * batch * (width + 2),
        flops={"fp32": 2 * steps * batch * width * CLASSES},
        terms=width + CLASSES + batch,
        roundings=4,
    ),
    bound="host",
    at_least={"sm90": 1.1},
)
def test_item_sync(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
