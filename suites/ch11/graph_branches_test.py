"""A graph with branches: several streams help only if the host is not the limit.

Problem    Run `towers` small networks (towers) of different widths, as in a model that embeds
           different kinds of features. Each tower has its own (batch, width) fp32 input, and
           computes a (batch, out) output by two linear layers with a relu between them. The towers
           are independent, and their outputs are concatenated at the end.
Baseline   in_turn: one tower after another, on one stream.
Optimized  streams: like `in_turn`, with a stream for each tower.
           captured: like `in_turn`, as a CUDA graph. The graph is one chain of kernels.
           branches: like `streams`, as a CUDA graph. The graph has a branch for each tower, because
           the capture records the waits between streams as dependencies in the graph.
Bound      The host limits `in_turn`. The host limits `streams` even more, because each wait between
           `streams` is also a host call. `captured` needs only one launch. The kernels of
           `captured` run one after another, and no product has enough tiles to use most of the SMs.
           In `branches`, the tiles of all towers share the SMs. The costs assume tiles of 64 x 64.
           The costs also add up the start times of all kernels, as if no two kernels started at the
           same time.
Seen       `in_turn` and `streams` take several times as long as predicted. The same work is much
           faster as a graph, so the extra time is spent on the host. The predicted time of a launch
           was measured with a small addition, not with linear layers. `captured` takes as long as
           predicted, and `branches` takes slightly longer than predicted.
Use when   A model has fixed shapes and independent parts whose kernels are too small to fill the
           GPU. Without a graph, `streams` help only if the work takes longer on the GPU than its
           launches take on the host.
"""

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, capture, compare

OUT = 64
SMS = 132  # of an H200, for costs
TILE = 64  # rows and columns of an output tile, for costs


def widths(towers):
    """Return the input width of each tower. All widths differ."""
    return [96 * (k + 1) for k in range(towers)]


def inputs(device, towers, batch, hidden):
    """Return the input and the two weights of each tower."""
    return tuple(
        (
            torch.randn(batch, width, device=device),
            torch.randn(hidden, width, device=device) * (2 / width) ** 0.5,
            torch.randn(OUT, hidden, device=device) * hidden**-0.5,
        )
        for width in widths(towers)
    )


def reference(*towers):
    parts = []
    for x, first, second in towers:
        parts.append((x.double() @ first.double().T).relu() @ second.double().T)
    return torch.cat(parts, 1)


def tower(x, first, second):
    return F.linear(F.linear(x, first).relu_(), second)


def in_turn(*towers):
    return torch.cat([tower(*each) for each in towers], 1)


def streams(*towers):
    gpu = torch.get_device_module(towers[0][0].device)
    main, results = gpu.current_stream(), []
    for each in towers:
        # High-priority streams have their own pool, so this is never the current stream.
        side = gpu.Stream(priority=-1)
        side.wait_stream(main)
        with gpu.stream(side):
            results.append((side, tower(*each)))
    for side, _ in results:
        main.wait_stream(side)
    return torch.cat([result for _, result in results], 1)


def captured(*towers):
    yield capture(lambda: in_turn(*towers))


def branches(*towers):
    yield capture(lambda: streams(*towers))


def product(batch, k, columns, count=1, **starts):
    """Return the cost of `count` products at the same time. SMs without a tile count as busy."""
    tiles = count * -(-batch // TILE) * -(-columns // TILE)
    ops = 2 * batch * k * columns * count * max(1.0, SMS / tiles)
    return Cost(read=4 * count * k * (batch + columns), ops={"fp32": ops}, **starts)


def join(towers, batch, **starts):
    size = 4 * towers * batch * OUT
    return Cost(read=size, write=size, **starts)


def one_by_one(towers, batch, hidden, steps=0, **start):
    """Return the cost of the towers one after another. `start` is the cost to start a kernel."""
    total = join(towers, batch, **start)
    for width in widths(towers):
        total = total + product(batch, width, hidden, host_steps=steps, **start)
        total = total + Cost(**start) + product(batch, hidden, OUT, **start)
    return total


def at_once(towers, batch, hidden):
    """Return the cost of towers that run at the same time. Their kernels start in turn."""
    average = sum(widths(towers)) // towers
    first = product(batch, average, hidden, towers, graph_nodes=2 * towers)
    second = product(batch, hidden, OUT, towers, graph_nodes=towers)
    return Cost(launches=1) + first + second + join(towers, batch, graph_nodes=1)


@compare(
    baseline=in_turn,
    optimized=[
        Variant(streams, at_least="yardstick"),
        Variant(captured, at_least={"sm90": 3.5}),
        Variant(branches, at_least={"sm90": 6.4}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"towers": 8, "batch": 256, "hidden": 512}],
    check_sizes=[
        {"towers": 3, "batch": 5, "hidden": 33},
        {"towers": 1, "batch": 1, "hidden": 7},
        {"towers": 2, "batch": 9, "hidden": 1},
    ],
    work=lambda towers, batch, hidden: Work(
        read=4 * sum(batch * w + hidden * w + OUT * hidden for w in widths(towers)),
        write=4 * towers * batch * OUT,
        flops={"fp32": 2 * batch * hidden * sum(w + OUT for w in widths(towers))},
        terms=max(96 * towers, hidden),
    ),
    bound="launch",
    costs={
        in_turn: lambda **size: one_by_one(**size, launches=1),
        # Host steps per tower: create a stream, make it wait, enter it, leave it, and wait for it.
        # Each of the two waits takes two steps, because it records an event first.
        streams: lambda **size: one_by_one(**size, steps=7, launches=1),
        captured: lambda **size: Cost(launches=1) + one_by_one(**size, graph_nodes=1),
        branches: at_once,
    },
)
def test_graph_branches(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
