"""Gradient accumulation: one batch of 256 rows instead of 8 micro-batches of 32.

Problem    Compute the fp32 gradients of the mean loss over 256 rows of an MLP width -> width ->
           width -> 10. Both sides compute the same gradients. Only the order of the sums differs.
Baseline   accumulated: 8 backward passes of 32 rows. Each pass divides the mean loss of its rows by
           8. `.grad` accumulates the gradients. Every pass reads all weights and writes all
           gradients. 7 of the 8 passes also add the new gradients to the old ones.
Optimized  fused: changes `accumulated`. One pass processes all rows.
Bound      fp32 arithmetic for `fused`. `accumulated` does the same FLOPs, but reads and writes the
           gradients 7 more times.
Seen       `accumulated` takes much longer than predicted. The prediction includes the additional
           bytes, so products of 32 rows must run at less than half of the fp32 rate. A result of 32
           x 4096 has only 32 tiles of 32 x 128 for 132 SMs, so most SMs are probably idle. We did
           not record which kernels cuBLAS uses. `fused` takes a third longer than predicted. The
           fp32 rate was measured with multiply-adds alone. `torch.matmul` in
           `../ch07/matmul_test.py` does not reach this rate either, which explains about half of
           the gap.
Use when   The batch fits in memory: do not split it. Use micro-batches only if the activations of
           the batch do not fit, and make each micro-batch as large as memory allows.
"""

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Work, compare

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


def one_pass(rows, width):
    """Return the cost of a forward and backward pass of `rows` rows. Activations stay in the L2."""
    ops = {"fp32": 2 * rows * width**2}
    through = Cost(read=4 * (width + rows) * width, write=4 * rows * width, ops=ops, launches=1)
    gradient = Cost(read=8 * rows * width, write=4 * width**2, ops=ops, launches=1)
    last = Cost(
        read=4 * CLASSES * width,
        write=4 * CLASSES * width,
        ops={"fp32": 6 * rows * width * CLASSES},
        launches=3,
    )
    others = Cost(launches=10)  # GELU, loss and their gradients
    return 3 * through + 2 * gradient + last + others


def eight_passes(width):
    adding = Cost(
        read=8 * (2 * width + CLASSES) * width,
        write=4 * (2 * width + CLASSES) * width,
        launches=3,
    )
    micro = one_pass(MICRO, width) + Cost(launches=2)  # the loss and its gradient are scaled
    return micro + (ROWS // MICRO - 1) * (micro + adding)


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
    costs={
        accumulated: eight_passes,
        fused: lambda width: one_pass(ROWS, width),
    },
    at_least={"sm90": 2.4, "cpu": 1.4},
)
def test_microbatch(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
