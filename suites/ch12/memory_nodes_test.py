"""Memory nodes: let a graph allocate its own temporary memory, so that graphs share it.

Problem    A stack of 4 MLP layers with residuals in bf16: x + silu(x @ up) @ down. The stack is
           captured as 8 CUDA graphs, one per batch size, from 1/8 of `tokens` to all `tokens`. A
           call runs all 8 batches. A layer needs temporary memory for its hidden activations.
Baseline   own_buffers: before each capture, the caller allocates a buffer for the hidden
           activations. The graph reads and writes this buffer, so the caller keeps it for as long
           as the graph exists.
Optimized  memory_nodes: changes `own_buffers`. Each layer allocates its hidden activations during
           the capture, and frees them again. So the graph has nodes that allocate and free. The
           driver gives their memory an address when the graph is captured, and physical memory
           before the node runs. Graphs that run one after another may share physical memory.
           one_buffer: changes `own_buffers`. The caller allocates one buffer, for the largest
           batch. Each graph uses the first rows of this buffer.
           no_graph: changes `own_buffers`. Nothing is captured. Each layer allocates its hidden
           activations from PyTorch's allocator, and each batch allocates its output.
Bound      Memory, not time. `own_buffers` needs hidden activations for every batch size. The sum of
           the batch sizes is 4.5 times the largest batch size. The other sides need hidden
           activations only for the largest batch size. All sides also need memory for the outputs
           of all batches. The driver rounds the memory of its nodes up to whole pages. So if all
           buffers together are smaller than a page, memory nodes save nothing. Matrix products take
           most of the predicted time, and all sides compute the same products. So all times should
           be about equal. The predicted times leave memory nodes out, because no rate for them was
           measured. The page declares the bound `host`, so calls are timed as the host makes them.
           The other clock would have to copy each graph into a larger graph, and CUDA cannot copy a
           graph that has memory nodes.
Seen       On an H200, `memory_nodes` and `one_buffer` need less than 40 % of the memory of
           `own_buffers`, as the sizes of the buffers predict. The times of these three sides do not
           differ measurably. The host's time varies by about a seventh, so a small cost of memory
           nodes would not show up. `no_graph` needs only a quarter of the memory of `own_buffers`.
           It runs the largest batch first, and frees the hidden activations of this batch before it
           allocates most of the outputs. `no_graph` takes 1.5 times as long as predicted, and is
           slower than the graphs. The profiler shows the same products on all sides, and that the
           GPU is idle for a quarter of a call of `no_graph`. So the host is probably the limit. Its
           predicted time leaves out the Python code of the layers.
Use when   You capture code that allocates temporary memory by `cudaMallocAsync`, such as a library
           to which you cannot pass a workspace. A capture turns these calls into memory nodes.
           Launch the graphs on one stream, because graphs that may run at the same time cannot
           share memory. The driver keeps the memory between launches. `cuDeviceGraphMemTrim` frees
           it, and the next launch takes it again. A graph with memory nodes can have only one
           instance at a time. If you know all sizes in advance, you do not need memory nodes: one
           buffer for the largest batch size takes as little memory. But if two graphs that use this
           buffer run at the same time, they overwrite each other's values. With memory nodes, the
           driver prevents this. By default, PyTorch's graphs have no memory nodes. They allocate
           from private pools, which `../ch13/graph_pools_test.py` compares. With
           `backend:cudaMallocAsync`, they have memory nodes.
"""

import sys
import weakref
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Work, capture, compare

LAYERS, SIZES, WIDER = 4, 8, 4


def inputs(device, tokens, width):
    hidden = WIDER * width
    x = torch.randn(tokens, width, device=device)
    ups = torch.randn(LAYERS, width, hidden, device=device) * width**-0.5
    downs = torch.randn(LAYERS, hidden, width, device=device) * hidden**-0.5
    return x.bfloat16(), ups.bfloat16(), downs.bfloat16()


def batches(x):
    """Return a list of views of x: the first rows for each batch size, the largest size first."""
    return [x[: len(x) * size // SIZES] for size in range(SIZES, 0, -1)]


def reference(x, ups, downs):
    results = []
    for rows in batches(x.double()):
        for up, down in zip(ups.double(), downs.double(), strict=True):
            rows = rows + F.silu(rows @ up) @ down
        results.append(rows)
    return tuple(results)


def hidden_of(rows):
    """Return uninitialized memory from PyTorch for the hidden activations of `rows`."""
    return rows.new_empty(len(rows), WIDER * rows.shape[1])


@contextmanager
def memory_node(rows):
    """Yield memory for hidden activations, allocated and freed by nodes of the captured graph.

    Outside a capture, and without a GPU, PyTorch allocates the memory.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        yield hidden_of(rows)
        return
    core = import_module("cuda.core")
    stream = core.Stream.from_handle(torch.cuda.current_stream().cuda_stream)
    shape = len(rows), WIDER * rows.shape[1]
    bytes_needed = rows.element_size() * shape[0] * shape[1]
    memory = core.GraphMemoryResource(torch.cuda.current_device())
    buffer = memory.allocate(bytes_needed, stream=stream)
    yield torch.from_dlpack(buffer).view(rows.dtype).view(shape)
    buffer.close(stream)


def run_layers(rows, out, ups, downs, hidden_memory):
    """Write the result for `rows` to `out`.

    `hidden_memory()` returns a context that yields memory for the hidden activations of a layer.
    """
    out.copy_(rows)
    for up, down in zip(ups, downs, strict=True):
        with hidden_memory() as hidden:
            torch.mm(out, up, out=hidden)
            F.silu(hidden, inplace=True)
            out.addmm_(hidden, down)
        del hidden  # otherwise it would live until the next layer has allocated too
    return out


def captured(rows, ups, downs, hidden_memory):
    """Return a function that replays a graph of all layers on `rows` and returns its output."""
    out = torch.empty_like(rows)
    return capture(lambda: run_layers(rows, out, ups, downs, hidden_memory))


def replays(graphs):
    return lambda: tuple(graph() for graph in graphs)


def own_buffers(x, ups, downs):
    graphs = []
    for rows in batches(x):
        buffer = nullcontext(hidden_of(rows))
        graphs.append(captured(rows, ups, downs, lambda buffer=buffer: buffer))
    yield replays(graphs)


def memory_nodes(x, ups, downs):
    yield replays(
        [captured(rows, ups, downs, lambda rows=rows: memory_node(rows)) for rows in batches(x)]
    )


def one_buffer(x, ups, downs):
    buffer = hidden_of(x)
    graphs = []
    for rows in batches(x):
        part = nullcontext(buffer[: len(rows)])
        graphs.append(captured(rows, ups, downs, lambda part=part: part))
    yield replays(graphs)


def no_graph(x, ups, downs):
    return tuple(
        run_layers(
            rows, torch.empty_like(rows), ups, downs, lambda rows=rows: nullcontext(hidden_of(rows))
        )
        for rows in batches(x)
    )


def rows_of(tokens):
    """Return the number of rows of each batch."""
    return [tokens * size // SIZES for size in range(SIZES, 0, -1)]


def work(tokens, width):
    rows, weights = sum(rows_of(tokens)), 2 * LAYERS * WIDER * width**2
    return Work(
        read=2 * (weights + tokens * width),
        write=2 * rows * width,
        flops={"bf16": 2 * rows * weights},
        terms=WIDER * width,
        roundings=3 * LAYERS,
    )


def batch_cost(rows, width, **starts):
    """Return the cost of a batch. Each kernel starts with `starts`."""
    weights, narrow, wide = 2 * WIDER * width**2, 2 * rows * width, 2 * rows * WIDER * width
    ops = {"bf16": 2 * rows * WIDER * width**2}
    layer = (
        Cost(read=weights + narrow, write=wide, ops=ops, **starts)  # up
        + Cost(read=wide, write=wide, **starts)  # silu
        + Cost(read=weights + wide + narrow, write=narrow, ops=ops, **starts)  # down
    )
    return Cost(read=narrow, write=narrow, **starts) + LAYERS * layer


def launched(tokens, width):
    first, *others = [batch_cost(rows, width, launches=1) for rows in rows_of(tokens)]
    return sum(others, first)


def replayed(tokens, width):
    first, *others = [
        Cost(launches=1) + batch_cost(rows, width, graph_nodes=1) for rows in rows_of(tokens)
    ]
    return sum(others, first)


@compare(
    baseline=own_buffers,
    optimized=[memory_nodes, one_buffer, no_graph],
    at_least="yardstick",  # the page is about memory
    inputs=inputs,
    reference=reference,
    sizes=[{"tokens": 4096, "width": 1024}],
    check_sizes=[{"tokens": 13, "width": 24}, {"tokens": 40, "width": 16}],
    work=work,
    bound="host",
    costs={no_graph: launched, **dict.fromkeys([own_buffers, memory_nodes, one_buffer], replayed)},
)
def test_memory_nodes(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
    # An output takes 1/4 of the hidden activations: (4 + 4.5) / (4.5 * 4 + 4.5) = 0.38.
    pair.assert_memory(at_most=0.5)  # and whole pages


class TestMemoryNode:
    def test_a_capture_allocates_and_frees_on_its_stream(self, monkeypatch):
        stream, device, calls = SimpleNamespace(cuda_stream=7), 3, []

        class Buffer(torch.Tensor):
            def close(self, stream):
                calls.append(("free", stream))

        class Pool:
            def __init__(self, device):
                calls.append(("pool", device))

            def allocate(self, count, stream):
                calls.append(("allocate", count, stream))
                return torch.zeros(count, dtype=torch.int8).as_subclass(Buffer)

        core = SimpleNamespace(
            GraphMemoryResource=Pool,
            Stream=SimpleNamespace(from_handle=lambda handle: f"stream {handle}"),
        )
        monkeypatch.setitem(sys.modules, "cuda.core", core)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
        with memory_node(torch.empty(5, 6, dtype=torch.bfloat16)) as hidden:
            calls.append(("use", hidden.shape, hidden.dtype))
        assert calls == [
            ("pool", 3),
            ("allocate", 2 * 5 * 24, "stream 7"),
            ("use", (5, 24), torch.bfloat16),
            ("free", "stream 7"),
        ]

    def test_outside_a_capture_pytorch_allocates(self):
        with memory_node(torch.empty(5, 6, dtype=torch.bfloat16)) as hidden:
            assert hidden.shape == (5, 24)
            assert hidden.dtype == torch.bfloat16


class TestRunLayers:
    def test_a_layer_frees_its_memory_before_the_next_layer_allocates(self):
        x, ups, downs = inputs("cpu", 8, 16)
        earlier = []

        def hidden_memory():
            assert all(hidden() is None for hidden in earlier)
            hidden = hidden_of(x)
            earlier.append(weakref.ref(hidden))
            return nullcontext(hidden)

        run_layers(x, torch.empty_like(x), ups, downs, hidden_memory)
        assert len(earlier) == LAYERS
