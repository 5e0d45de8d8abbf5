"""A graph with branches: several streams help only if the host is not the limit.

Problem    `towers` small networks of different widths, as in a model that embeds different kinds of
           features. Each turns its own (batch, width) fp32 input into (batch, out) by two linear
           layers with a relu between them. The towers do not depend on each other. Their outputs
           are joined at the end.
Baseline   in_turn: one tower after another, on one stream.
Optimized  streams: of in_turn, with a stream for each tower.
           captured: of in_turn, as a CUDA graph. The graph is one chain of kernels.
           branches: of streams, as a CUDA graph. The graph has a branch for each tower, because a
           capture follows the events by which streams wait for each other.
Bound      The host limits in_turn, and streams even more, because the waits of streams are calls
           too. captured is one launch for the host, and is limited by the latency of its kernels,
           which run one after the other. branches runs the towers at the same time. A cost adds the
           starts of all kernels of a graph, as if they formed a chain. So it predicts the same time
           for both graphs.
Use when   A model has independent parts with kernels too small to fill the GPU, and the shapes are
           fixed enough to capture it. Without a graph, give streams work that takes longer on the
           GPU than its launches take on the host.
"""

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, capture, compare

OUT = 64


def widths(towers):
    """Return the input widths, which all differ."""
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


def tower_cost(batch, width, hidden, launches, waits=0):
    return Cost(
        read=4 * (batch * width + hidden * width + OUT * hidden),
        ops={"fp32": 2 * batch * hidden * (width + OUT)},
        launches=launches,
        host_steps=waits,
    )


def join(towers, batch, launches):
    size = 4 * towers * batch * OUT
    return Cost(read=size, write=size, launches=launches)


def eager(towers, batch, hidden, waits):
    total = join(towers, batch, launches=1)
    for width in widths(towers):
        total = total + tower_cost(batch, width, hidden, launches=3, waits=waits)
    return total


def graph(towers, batch, hidden):
    total = join(towers, batch, launches=1) + Cost(graph_nodes=1)
    for width in widths(towers):
        total = total + tower_cost(batch, width, hidden, launches=0) + Cost(graph_nodes=3)
    return total


@compare(
    baseline=in_turn,
    optimized=[Variant(streams, at_least="yardstick"), captured, branches],
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
        in_turn: lambda **size: eager(**size, waits=0),
        # A stream is made, waits, becomes current and is left again, and is waited for. Each wait
        # records an event first.
        streams: lambda **size: eager(**size, waits=7),
        captured: graph,
        branches: graph,
    },
)
def test_graph_branches(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
