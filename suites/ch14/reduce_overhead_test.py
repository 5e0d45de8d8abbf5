"""Reduce overhead: fusion removes some launches, and a CUDA graph removes nearly all of them.

Problem    Run a small fp32 pre-norm MLP of `layers` layers with a residual, for a few rows. The
           weights are the parameters of a module.
Baseline   eager: the module launches four kernels per layer: norm, product, SiLU and sum.
Optimized  compiled: changes `eager`. With the default mode of `torch.compile`, everything in a
           layer except the matrix product becomes one kernel.
           reduce_overhead: changes `compiled`. `mode="reduce-overhead"` captures the compiled code
           as a CUDA graph and replays it. Each call copies x to the graph's input. The result is
           cloned, because the next call overwrites it. Parameters are not copied.
           captured: changes `compiled`. The compiled code is captured by hand with
           `torch.cuda.graph`. The graph reads x at its original address, and the result is not
           cloned, so nothing is copied. No guards are checked.
           eager_captured: like `captured`, but not compiled.
Bound      The host limits `eager`, `compiled` and `reduce_overhead`. The GPU limits the captured
           sides: small kernels run one after another. The costs count the weights as reads from the
           L2. We did not measure how long the host takes to check guards and compare addresses, so
           the costs leave out this time, and predict that the GPU also limits `reduce_overhead`.
Seen       On an H100, `captured` takes three times as long as predicted from the starts of its
           kernels. A matrix product of 8 rows has only a few tiles, and each tile loops over the
           whole inner dimension. So the product probably takes longer to run than to start.
           `reduce_overhead` replays the same kernels and takes several times as long as `captured`,
           so the guards, copies and address checks take more time than the kernels. The time of
           `eager` varies by 50 % from one result to the next, so these ratios are rough. The
           speedup of `compiled` is within this variation, so the page claims only that `compiled`
           is not slower. On an H200, `eager_captured` also takes more than twice as long as
           predicted. The two captured sides were recorded on different GPUs, so we do not know how
           much `captured` gains over `eager_captured`.
Use when   The GPU waits for the host. Start with `mode="reduce-overhead"`. If a shape or a
           parameter's address changes, this mode captures a new graph. Code that cannot be captured
           runs outside the graph. Capture by hand if the shapes are fixed and every microsecond
           counts. If the kernels take longer than their launches, capturing does not help.
"""

import torch
from torch import nn
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, capture, compare


class Mlp(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(w, requires_grad=False) for w in weights)

    def forward(self, x):
        return layered(x, self.weights)


def layered(x, weights):
    for weight in weights:
        hidden = F.rms_norm(x, x.shape[-1:], eps=1e-5)
        x = x + F.silu(hidden @ weight)
    return x


def state(device, layers, rows, width):
    return torch.randn(layers, width, width, device=device) / width**0.5


def inputs(device, layers, rows, width):
    return (torch.randn(rows, width, device=device),)


def reference(weights, x):
    return layered(x.double(), weights.double())


def eager(weights, x):
    model = Mlp(weights)
    yield lambda: model(x)


def compiled(weights, x):
    model = torch.compile(Mlp(weights), dynamic=False)
    model(x)
    yield lambda: model(x)


def reduce_overhead(weights, x):
    model = torch.compile(Mlp(weights), dynamic=False, mode="reduce-overhead")
    for _ in range(3):  # the second call captures the graph, the third replays it
        torch.compiler.cudagraph_mark_step_begin()
        model(x)

    def call():
        torch.compiler.cudagraph_mark_step_begin()
        return model(x).clone()

    yield call


def captured(weights, x):
    model = torch.compile(Mlp(weights), dynamic=False)
    model(x)
    yield capture(lambda: model(x))


def eager_captured(weights, x):
    model = Mlp(weights)
    yield capture(lambda: model(x))


def network(layers, rows, width, **starts):
    """Return the cost of the network. The weights are read from the L2."""
    ops = {"fp32": 2 * layers * rows * width**2}
    return Cost(l2=4 * layers * width**2, ops=ops, **starts)


@compare(
    baseline=eager,
    optimized=[
        Variant(compiled, at_least="neutral"),  # its speedup is within the noise of the host
        Variant(reduce_overhead, at_least={"sm90": 2.4}),
        Variant(captured, at_least={"sm90": 5.3}),
        Variant(eager_captured, at_least={"sm90": 1.5}),
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 8, "rows": 8, "width": 256}],
    check_sizes=[{"layers": 2, "rows": 5, "width": 33}],
    work=lambda layers, rows, width: Work(
        flops={"fp32": 2 * layers * rows * width**2}, terms=width, roundings=8 * layers
    ),
    bound="launch",
    costs={
        # Norm, matrix product, silu and sum, in each layer
        eager: lambda layers, **size: network(layers, **size, launches=4 * layers),
        # The first norm. In each layer, the matrix product and one kernel up to the next norm
        compiled: lambda layers, **size: network(layers, **size, launches=2 * layers + 1),
        reduce_overhead: lambda layers, **size: network(
            layers, **size, launches=3, graph_nodes=2 * layers + 1
        ),
        captured: lambda layers, **size: network(
            layers, **size, launches=1, graph_nodes=2 * layers + 1
        ),
        eager_captured: lambda layers, **size: network(
            layers, **size, launches=1, graph_nodes=4 * layers
        ),
    },
)
def test_reduce_overhead(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
