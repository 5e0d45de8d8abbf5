"""Inputs at new addresses: copy them to one graph's input, or capture a graph per address.

Problem    Four requests are at different addresses. Run each through a small fp32 MLP of 24
           kernels. A CUDA graph reads and writes only the addresses of its capture.
Baseline   eager: 24 launches per request.
Optimized  copied_in: changes `eager`. All requests share one graph. A request is copied to the
           address that the graph reads. The result is copied out, because the next replay
           overwrites it.
           graph_each: changes `copied_in`. Each request has its own graph, so nothing is copied.
           All graphs read the same weights, and each graph writes its own result. Each address
           needs a capture.
           recaptured: changes `eager`. Each request is captured in a new graph, which is
           instantiated and replayed once.
           updated: changes `recaptured`. Each request is captured in a new graph, but no new
           instance is made. Instead, `cuGraphExecUpdate` writes the new addresses into the existing
           instance.
Bound      The host limits `eager`. `copied_in` makes three launches per request, and the GPU runs
           26 kernels per request. `recaptured` and `updated` make the same torch calls as `eager`,
           but each call records its kernel in a graph instead of launching it. Then recaptured
           instantiates this graph of 24 nodes, and updated compares it with the first graph. We did
           not measure how long it takes to begin and end a capture, to instantiate, or to update.
           So the predicted times count each recorded kernel as a launch, and leave out the rest.
Seen       On an H100, all sides take longer than predicted. For eager, the predicted time of a
           launch was measured with an addition, not with products. For `copied_in` and
           `graph_each`, a kernel of a few rows takes longer to run than to start, because it waits
           for the previous kernel and for its weights. We did not measure how long such a kernel
           takes alone. The difference between `updated` and `eager` is within the confidence
           interval. `recaptured` probably takes longer than `eager`. So a capture saves nothing if
           it is used only once.
Use when   Inputs arrive in new tensors. If the inputs are small, copy them, as
           `torch.compile(mode="reduce-overhead")` does. Capture a graph for each address if there
           are few addresses and the inputs are large. If a grid or a scalar argument changes, a
           copy does not help. If such changes are rare, update the graph.
"""

from importlib import import_module

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, capture, compare

REQUESTS, ROWS, LAYERS = 4, 8, 8
KERNELS = 3 * LAYERS


def inputs(device, width):
    weights = torch.randn(LAYERS, width, width, device=device) / width**0.5
    return [torch.randn(ROWS, width, device=device) for _ in range(REQUESTS)], weights


def forward(x, weights):
    for weight in weights:
        x = x + F.silu(x @ weight)
    return x


def reference(requests, weights):
    return [forward(x.double(), weights.double()) for x in requests]


def eager(requests, weights):
    weights = weights.unbind(0)
    return [forward(x, weights) for x in requests]


def copied_in(requests, weights):
    weights = weights.unbind(0)
    x_now = torch.zeros_like(requests[0])
    replay = capture(lambda: forward(x_now, weights))

    def call():
        results = []
        for x in requests:
            x_now.copy_(x)
            results.append(replay().clone())
        return results

    yield call


def graph_each(requests, weights):
    weights = weights.unbind(0)
    graphs = [capture(lambda x=x: forward(x, weights)) for x in requests]
    yield lambda: [graph() for graph in graphs]


class Recorder:
    """Captures each call in a new graph, all in one memory pool. Without a GPU, calls the step."""

    def __init__(self, step):
        self.first, self.output = None, None
        if not torch.cuda.is_available():
            return
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(3):  # the first call makes torch and cuBLAS create their state
                step()
        torch.cuda.current_stream().wait_stream(self.stream)
        self.pool = torch.cuda.graph_pool_handle()
        self.first, self.output = self.record(step)
        self.first.instantiate()

    def record(self, step):
        """Return a graph of `step` that is not instantiated, and the output tensor of `step`."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            output = step()
            graph.capture_end()
        return graph, output

    def replay_new(self, step):
        """Capture `step` in a new graph, instantiate it, replay it, and return its output."""
        if self.first is None:
            return step()
        graph, output = self.record(step)
        graph.instantiate()
        graph.replay()
        return output

    def replay_updated(self, step):
        """Capture `step`, update the first instance, replay it, and return the new output."""
        if self.first is None:
            return step()
        driver = import_module("cuda.bindings.driver")
        graph, output = self.record(step)
        instance = driver.CUgraphExec(self.first.raw_cuda_graph_exec())
        status, info = driver.cuGraphExecUpdate(instance, driver.CUgraph(graph.raw_cuda_graph()))
        if status.value:
            raise RuntimeError(f"cuGraphExecUpdate: {status.name}, {info.result.name}")
        self.first.replay()
        return output


def recaptured(requests, weights):
    weights = weights.unbind(0)
    recorder = Recorder(lambda: forward(requests[0], weights))
    yield lambda: [recorder.replay_new(lambda x=x: forward(x, weights)) for x in requests]


def updated(requests, weights):
    weights = weights.unbind(0)
    recorder = Recorder(lambda: forward(requests[0], weights))
    yield lambda: [recorder.replay_updated(lambda x=x: forward(x, weights)) for x in requests]


def answered(width, **starts):
    """Return the cost of one request. Weights and activations stay in the L2."""
    ops = {"fp32": 2 * LAYERS * ROWS * width**2}
    return Cost(l2=4 * LAYERS * width**2, ops=ops, **starts)


def captured_again(width):
    """Return the cost to record and replay all kernels, without the time to instantiate."""
    recorded = Cost(launches=KERNELS)
    return REQUESTS * (recorded + answered(width, launches=1, graph_nodes=KERNELS))


@compare(
    baseline=eager,
    optimized=[
        Variant(copied_in, at_least={"sm90": 3.0}),
        Variant(graph_each, at_least={"sm90": 4.4}),
        Variant(recaptured, at_least="yardstick"),
        Variant(updated, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"width": 256}],
    check_sizes=[{"width": 17}],
    work=lambda width: Work(
        flops={"fp32": 2 * REQUESTS * LAYERS * ROWS * width**2},
        terms=width,
        roundings=5 * LAYERS,
    ),
    bound="launch",
    costs={
        eager: lambda width: REQUESTS * answered(width, launches=KERNELS),
        copied_in: lambda width: REQUESTS * answered(width, launches=3, graph_nodes=KERNELS),
        graph_each: lambda width: REQUESTS * answered(width, launches=1, graph_nodes=KERNELS),
        **dict.fromkeys([recaptured, updated], captured_again),
    },
)
def test_new_addresses(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
