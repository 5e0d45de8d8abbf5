"""Gradient accumulation: one batch of 256 rows instead of 8 micro-batches of 32.

Problem    Gradients of the mean loss over 256 rows of an MLP width -> width -> width -> 10, fp32.
           Both sides compute the same gradients; nothing but the order of the sums differs.
Baseline   accumulated: 8 backward passes, each on an eighth of its mean loss, added up in `.grad`.
           At width 4096 each pass reads 201 MB of weights and writes 134 MB of gradients, and 7 of
           them move 403 MB more to add those up: 5.5 GB, 1.3 ms at 4.2 TB/s, in 180 launches.
Optimized  fused: the same rows in one pass: 335 MB, 0.08 ms, in 20 launches.
Bound      Instruction issue: the 43 GFLOP of either side take 0.84 ms at 51 TFLOP/s of fp32. Only
           the adding up (0.67 ms) comes on top in the baseline: 1.5 / 0.84 = 1.8x. The 8 to 16x of
           launches and traffic need layers too narrow, or arithmetic too fast, to be the limit.
"""

import torch
from torch.nn import functional as F

from pytest_aisp import Work, compare

ROWS, MICRO, CLASSES = 256, 32, 10


def inputs(device, width):
    def weight(fan_out):
        return torch.randn(fan_out, width, device=device) / width**0.5

    labels = torch.randint(CLASSES, (ROWS,), device=device)
    return (
        torch.randn(ROWS, width, device=device),
        labels,
        weight(width),
        weight(width),
        weight(CLASSES),
    )


def loss(x, y, first, second, last):
    hidden = F.gelu(F.linear(x, first))
    hidden = F.gelu(F.linear(hidden, second))
    return F.cross_entropy(F.linear(hidden, last), y)


def parameters(weights):
    return [w.detach().requires_grad_() for w in weights]


def reference(x, y, *weights):
    weights = parameters([w.double() for w in weights])
    return torch.autograd.grad(loss(x.double(), y, *weights), weights)


def accumulated(x, y, *weights):
    weights = parameters(weights)
    for rows, labels in zip(x.split(MICRO), y.split(MICRO), strict=True):
        (loss(rows, labels, *weights) * (MICRO / ROWS)).backward()
    return [w.grad for w in weights]


def fused(x, y, *weights):
    weights = parameters(weights)
    loss(x, y, *weights).backward()
    return [w.grad for w in weights]


@compare(
    baseline=accumulated,
    optimized=[fused],
    inputs=inputs,
    reference=reference,
    sizes=[{"width": 4096}],
    check_sizes=[{"width": 33}],
    cpu_sizes=[{"width": 256}],
    work=lambda width: Work(
        read=4 * (2 * width + ROWS + CLASSES) * width,
        write=4 * (2 * width + CLASSES) * width,
        flops={"fp32": 2 * ROWS * width * (5 * width + 3 * CLASSES)},
        terms=max(width, ROWS),
        roundings=8,
    ),
    bound="issue",
    at_least={"sm90": 2.4, "cpu": 1.4},
)
def test_microbatch(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
