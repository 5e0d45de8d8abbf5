"""Graph breaks: a Python `if` on data splits the graph, so use a tensor operation instead.

Problem    Compute fp32 blocks x = clip(x + silu(x w)) on a few rows. If the RMS of x + silu(x w) is
           above a limit, clip scales the values down so that the RMS equals the limit. About 10 of
           the 16 blocks clip.
Baseline   broken: `torch.compile` compiles a block with `if rms > limit`. Dynamo makes two graphs:
           the code before the branch, and the scaling after it. Between the two graphs, the host
           waits for the RMS.
Optimized  cond: changes `broken`. `torch.cond` keeps the branch in the graph, so the block is one
           graph. But Inductor's code for `torch.cond` still reads the condition on the host and
           branches in Python. A branch of `torch.cond` must not return its input, so a block that
           does not clip copies x.
           where: changes `broken`. `torch.where` selects the factor, so the block is one graph, and
           the host does not wait. `fullgraph=True` makes any graph break an error.
           whole: changes where. The loop over the blocks is also compiled, so the host calls
           compiled code once instead of once per block.
           eager: like `broken`, but not compiled.
Bound      The host. `broken`, `cond` and `eager` wait for the GPU once per block, and launch
           nothing while they wait. `where` and `whole` never wait, and launch two kernels per
           block. The host also takes time to check guards and to call compiled code. We did not
           measure this time separately, so the costs leave it out, and `where` and `whole` have the
           same cost. The costs of `broken` and `eager` assume that every block clips. Each limit is
           a separate tensor. If the limits were elements of one tensor, most of them would not be
           aligned to 16 bytes, and compiled code copies unaligned inputs before it runs. Only
           `whole` would avoid these copies, because its input would be the entire tensor.
Seen       On an H100, `eager` is no slower than `broken`, although it launches three times as many
           kernels. All compiled sides take longer than predicted. `where` and `whole` launch the
           same kernels, but `where` calls compiled code once per block. These calls explain the
           difference between the two, which is more than half of the time of `where`. `broken`
           calls compiled code twice per block, before and after the break, which explains its time.
           `cond` calls compiled code once per block, but takes as long as `broken`. We did not
           measure what Inductor's code for a branch does on the host.
Use when   A branch on data chooses between two results that are cheap to compute. Compute both
           results and select one. Keep the branch if one path takes longer than the wait.
           `torch._dynamo.explain` and `TORCH_LOGS=graph_breaks` list the breaks of a model.
"""

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare


def inputs(device, layers, rows, width):
    weights = torch.randn(layers, width, width, device=device) / width**0.5
    # Limits are 0.5 to 1.5 times the RMS of the first block, which is about 1.2.
    limits = [1.2 * (0.5 + torch.rand((), device=device)) for _ in range(layers)]
    return torch.randn(rows, width, device=device), weights, limits


def grown(x, w):
    """Return x + silu(x w) and its RMS."""
    x = x + F.silu(x @ w)
    return x, x.square().mean().sqrt()


def block_if(x, w, limit):
    x, rms = grown(x, w)
    if rms > limit:
        x = x * (limit / rms)
    return x


def block_cond(x, w, limit):
    x, rms = grown(x, w)

    def clip(x, rms, limit):
        return x * (limit / rms)

    def keep(x, rms, limit):
        return x.clone()

    return torch.cond(rms > limit, clip, keep, (x, rms, limit))


def block_where(x, w, limit):
    x, rms = grown(x, w)
    return x * torch.where(rms > limit, limit / rms, 1.0)


def loop(block, x, weights, limits):
    for w, limit in zip(weights.unbind(0), limits, strict=True):
        x = block(x, w, limit)
    return x


def loop_where(x, weights, limits):
    return loop(block_where, x, weights, limits)


def reference(x, weights, limits):
    return loop_where(x.double(), weights.double(), [limit.double() for limit in limits])


def eager(x, weights, limits):
    return loop(block_if, x, weights, limits)


def broken(x, weights, limits):
    block = torch.compile(block_if, dynamic=False)
    for scale in (0, 1e9):  # compiles the branch that clips, then the other branch
        loop(block, x, weights, [scale * limit for limit in limits])
    yield lambda: loop(block, x, weights, limits)


def cond(x, weights, limits):
    block = torch.compile(block_cond, dynamic=False, fullgraph=True)
    loop(block, x, weights, limits)
    yield lambda: loop(block, x, weights, limits)


def where(x, weights, limits):
    block = torch.compile(block_where, dynamic=False, fullgraph=True)
    loop(block, x, weights, limits)
    yield lambda: loop(block, x, weights, limits)


def whole(x, weights, limits):
    model = torch.compile(loop_where, dynamic=False, fullgraph=True)
    model(x, weights, limits)
    yield lambda: model(x, weights, limits)


def blocks(layers, rows, width, **starts):
    """Return the cost of all blocks. The weights are read from the L2."""
    ops = {"fp32": 2 * rows * width**2}
    return layers * Cost(l2=4 * width**2, ops=ops, **starts)


@compare(
    baseline=broken,
    optimized=[
        Variant(cond, at_least="yardstick"),
        Variant(where, at_least={"sm90": 1.1}),
        Variant(whole, at_least={"sm90": 2.8}),
        Variant(eager, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 16, "rows": 8, "width": 256}],
    check_sizes=[{"layers": 2, "rows": 5, "width": 33}],
    work=lambda layers, rows, width: Work(
        flops={"fp32": 2 * layers * rows * width**2}, terms=width, roundings=8 * layers
    ),
    bound="host",
    costs={
        # The product, one fused kernel through the comparison, and scaling (cond: or a copy).
        broken: lambda **size: blocks(**size, launches=3, syncs=1),
        cond: lambda **size: blocks(**size, launches=3, syncs=1),
        where: lambda **size: blocks(**size, launches=2),
        whole: lambda **size: blocks(**size, launches=2),
        # Matrix product, silu, sum, square, mean, root, comparison, quotient, scaling.
        eager: lambda **size: blocks(**size, launches=9, syncs=1),
    },
)
def test_graph_breaks(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
