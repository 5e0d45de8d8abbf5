"""Reading losses: do not wait for the GPU after each batch.

Problem    Evaluate a linear classifier on `steps` batches that arrive one at a time. Return the
           loss of every batch on the host, for example for a log.
Baseline   every_step: `.item()` after each batch. The host waits until the GPU is idle, and then
           the GPU is idle until the host launches the next batch.
Optimized  every_sixteenth: changes `every_step`. The host waits only after every 16 steps. The
           losses stay on the GPU and are copied to the host 16 at a time.
           at_the_end: changes `every_sixteenth`. One copy fetches all losses.
Bound      The host on every side: the host launches three small kernels per batch. In `every_step`,
           it also waits for the GPU.
Seen       `every_step` takes longer than predicted. The predicted time of a wait was measured while
           the GPU was idle. Here, each wait includes the kernels of the batch that are still
           running. We did not measure their times. The result is the mean of two recordings. The
           host's time differed a lot between the two recordings, and we cannot explain why.
Use when   A loop of small kernels reads a value in every step. When each step takes milliseconds on
           the GPU, a wait costs little. When the next step depends on the value, keep the wait.
"""

import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from pytest_aisp import Cost, Work, compare

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


def batches(count, batch, width):
    """Return the cost of `count` batches, each with two views and four tensors for the loss."""
    return Cost(
        read=4 * count * batch * (width + 2),
        ops={"fp32": 2 * count * batch * width * CLASSES},
        launches=3 * count,
        host_steps=6 * count,
    )


def fetching(count):
    """Return the cost of stacking `count` losses (a view of each) and reading the result."""
    return Cost(launches=1, host_steps=count + 1, syncs=1)


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
    costs={
        every_step: lambda steps, batch, width: steps * (batches(1, batch, width) + Cost(syncs=1)),
        every_sixteenth: lambda steps, batch, width: (
            -(-steps // 16) * (batches(16, batch, width) + fetching(16))
        ),
        at_the_end: lambda steps, batch, width: batches(steps, batch, width) + fetching(steps),
    },
    at_least={"sm90": 1.1},
)
def test_item_sync(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
