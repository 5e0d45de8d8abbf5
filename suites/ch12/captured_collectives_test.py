"""Captured collectives: put the all-reduces of a forward pass into the graph too.

Problem    Run 16 tensor-parallel fp32 layers on 8 rows, as in decoding. In each layer, each rank
           multiplies by its part of the weights, an all-reduce sums the products, and a tanh
           follows.
Baseline   eager: a product, an all-reduce and a tanh per layer, each called by the host.
Optimized  captured: changes `eager`. On each rank, all layers are one CUDA graph, including NCCL's
           kernels.
           around_collectives: changes `eager`. The work between two all-reduces is a graph, and the
           host calls the all-reduces. Use this form if a collective cannot be captured.
Bound      The host limits `eager` and `around_collectives`, because it calls torch.distributed for
           each layer. The latency of the all-reduces, which run one after another, limits
           `captured`. A message of 8 rows is so short that its size hardly matters.
Seen       On two H200s, `captured` is within a tenth of its prediction. `eager` takes almost five
           times as long as predicted, and `around_collectives` more than three times. The costs
           assume that each launch takes as long as a torch operator. A call of torch.distributed
           takes more host time. `around_collectives` still makes all calls of torch.distributed, so
           it gains far less than `captured`.
Use when   A tensor-parallel model decodes with small batches. All ranks must capture and replay the
           same collectives in the same order, or they wait forever. Give each graph its own
           communicator, and call no eager collective on it during a replay. To make the all-reduce
           itself faster, see `../ch04/symmetric_all_reduce_test.py`.
"""

import torch
import torch.distributed as dist

from pytest_aisp import Conditions, Cost, Work, capture, compare

ROWS, LAYERS = 8, 16


def inputs(device, width):
    """Return this rank's part of the first input, and its part of each layer's weights."""
    weights = 0.5 * torch.randn(LAYERS, width, width, device=device) / width**0.5
    return torch.randn(ROWS, width, device=device), weights


def reference(ranks):
    parts = [x.double() @ weights[0].double() for x, weights in ranks]
    x = torch.tanh(sum(parts))
    for k in range(1, LAYERS):
        x = torch.tanh(sum(x @ weights[k].double() for _, weights in ranks))
    return [x] * len(ranks)


def layers(x, weights):
    for weight in weights.unbind(0):
        x = torch.mm(x, weight)
        dist.all_reduce(x)
        x.tanh_()
    return x


def eager(x, weights):
    return layers(x, weights)


def captured(x, weights):
    yield capture(lambda: layers(x, weights))


def around_collectives(x, weights):
    first, *others = weights.unbind(0)
    sums = [torch.zeros_like(x) for _ in range(LAYERS)]

    def middle(k):
        torch.mm(sums[k - 1].tanh_(), others[k - 1], out=sums[k])

    begin = capture(lambda: torch.mm(x, first, out=sums[0]))
    graphs = [capture(lambda k=k: middle(k)) for k in range(1, LAYERS)]

    def call():
        begin()
        dist.all_reduce(sums[0])
        for k, graph in enumerate(graphs, start=1):
            graph()
            dist.all_reduce(sums[k])
        return sums[-1].tanh()

    yield call


def one_layer(width, world, launches, graph_nodes=0):
    """Return the cost of a layer. The weights of all layers are larger than the L2."""
    product = Cost(read=4 * width**2, ops={"fp32": 2 * ROWS * width**2}, launches=launches)
    sent = 2 * (world - 1) / world * 4 * ROWS * width
    return product + Cost(nccl=sent, collectives=1, graph_nodes=graph_nodes)


@compare(
    baseline=eager,
    optimized=[captured, around_collectives],
    inputs=inputs,
    reference=reference,
    sizes=[{"width": 1024}],
    check_sizes=[{"width": 17}],
    work=lambda width, world: Work(
        wire=LAYERS * 2 * (world - 1) / world * 4 * ROWS * width,
        read=4 * LAYERS * width**2,
        flops={"fp32": 2 * LAYERS * ROWS * width**2},
        terms=width,
        roundings=3 * LAYERS,
    ),
    bound="launch",
    costs={
        eager: lambda width, world: LAYERS * one_layer(width, world, launches=3),
        captured: lambda width, world: (
            Cost(launches=1) + LAYERS * one_layer(width, world, launches=0, graph_nodes=3)
        ),
        around_collectives: lambda width, world: (
            Cost(launches=1) + LAYERS * one_layer(width, world, launches=2, graph_nodes=2)
        ),
    },
    conditions=Conditions(gpus=2),
)
def test_captured_collectives(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
