"""CUDA graphs on a fake driver: which nodes are counted and refused, and how captures end."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import weakref
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from fake_driver import Driver, graph
from fake_driver import nodes as kinds

from pytest_aisp.isolation.protections import without
from pytest_aisp.page.pair import SideError
from pytest_aisp.timing import cuda_graph
from pytest_aisp.timing.cuda_graph import (
    Uncounted,
    check_nodes,
    contradiction,
    count_nodes,
    node_name,
)


@pytest.fixture
def driver(monkeypatch):
    """Replace the driver by a fake one."""

    def install(fails=""):
        monkeypatch.setattr(cuda_graph, "import_module", lambda name: Driver(fails))

    install()
    return install


def window(*content, calls=2, name="side"):
    side, captured = SimpleNamespace(name=name), graph(list(content))
    return SimpleNamespace(side=side, calls=calls, nodes=lambda: count_nodes(captured))


def test_nodes_are_counted_by_type(driver):
    words = "KERNEL KERNEL MEMCPY MEMSET HOST EMPTY WAIT_EVENT EVENT_RECORD MEM_ALLOC MEM_FREE"
    assert count_nodes(graph(kinds(words))) == {
        "kernel": 2,
        "memcpy": 1,
        "memset": 1,
        "host node": 1,
        "empty node": 1,
        "event wait": 1,
        "event record": 1,
        "mem alloc": 1,
        "mem free": 1,
    }
    assert count_nodes(graph([])) == {}


def test_the_nodes_of_child_graphs_are_counted_too(driver):
    inner = [*kinds("KERNEL"), kinds("MEMSET HOST")]
    counts = count_nodes(graph([*kinds("KERNEL"), inner]))
    assert counts == {"kernel": 2, "memset": 1, "host node": 1, "child graph": 2}


@pytest.mark.parametrize(
    "function", ["cuGraphGetNodes", "cuGraphNodeGetType", "cuGraphChildGraphNodeGetGraph"]
)
def test_driver_errors_prevent_counting(driver, function):
    driver(fails=function)
    with pytest.raises(Uncounted, match=f"^{function}: CUDA_ERROR_INVALID_VALUE$"):
        count_nodes(graph([kinds("KERNEL")]))


def test_nodes_are_not_counted_without_torch_or_driver_support(driver, monkeypatch):
    with pytest.raises(Uncounted, match="no attribute 'raw_cuda_graph'"):
        count_nodes(SimpleNamespace())

    def missing(name):
        raise ImportError(f"No module named '{name}'")

    monkeypatch.setattr(cuda_graph, "import_module", missing)
    result = check_nodes([window(*kinds("HOST")), window(*kinds("HOST"))])
    assert result == {"no graph_nodes": "No module named 'cuda.bindings.driver'"}


def test_host_nodes_are_refused_in_child_graphs_too(driver):
    message = "side: 1 of the 3 nodes in its graph call back to the CPU, which a graph clock"
    for content in (kinds("KERNEL HOST KERNEL"), [*kinds("KERNEL"), kinds("HOST")]):
        with pytest.raises(SideError, match=message):
            check_nodes([window(*kinds("KERNEL")), window(*content)])
        with without(["graph-nodes"]):
            assert check_nodes([window(*kinds("KERNEL")), window(*content)])["graph_nodes"]


@pytest.mark.parametrize("words", ["", "EMPTY", "EVENT_RECORD WAIT_EVENT", "MEM_ALLOC MEM_FREE"])
def test_a_graph_in_which_nothing_computes_is_refused(driver, words):
    idle = window(*kinds(words), name="idle")
    count = len(words.split())
    with pytest.raises(SideError, match=f"^idle: nothing computes in its graph of {count} nodes, "):
        check_nodes([idle, window(*kinds("KERNEL"))])
    with without(["graph-nodes"]):
        assert "graph_nodes" in check_nodes([idle, idle])


def test_nodes_that_compute_or_move_data_are_accepted():
    for constant in ("KERNEL", "MEMCPY", "MEMSET", "CONDITIONAL"):
        assert contradiction({node_name(constant): 1}) == ""


def test_a_child_graph_counts_by_its_own_nodes(driver):
    assert check_nodes([window(kinds("KERNEL")), window(*kinds("KERNEL"))])
    with pytest.raises(SideError, match="nothing computes"):
        check_nodes([window(kinds("EMPTY")), window(*kinds("KERNEL"))])


def test_counts_are_per_call_and_side(driver):
    counts = check_nodes([window(*kinds("KERNEL " * 6)), window(*kinds("KERNEL MEMSET MEMSET"))])
    assert counts == {
        "graph_nodes": {"baseline": {"kernel": 3}, "optimized": {"kernel": 0.5, "memset": 1}}
    }


def test_node_names_match_the_real_driver():
    pytest.importorskip("cuda.bindings", reason="needs cuda-bindings: pip install cuda-bindings")
    driver = importlib.import_module("cuda.bindings.driver")
    known = {kind.name.removeprefix(cuda_graph.PREFIX) for kind in driver.CUgraphNodeType}
    assert known >= cuda_graph.NODE_NAMES.keys()
    assert {node_name(name) for name in known} >= cuda_graph.IDLE
    assert known >= {kind.name.removeprefix(cuda_graph.PREFIX) for kind in Driver.CUgraphNodeType}
    for name in ("cuGraphGetNodes", "cuGraphNodeGetType", "cuGraphChildGraphNodeGetGraph"):
        assert callable(getattr(driver, name))


def test_host_nodes_are_accepted_on_several_ranks(monkeypatch):
    """NCCL drives networks from the host, out of the graph."""
    monkeypatch.setattr(cuda_graph, "current_group", lambda: SimpleNamespace(world=2))
    assert contradiction({"kernel": 2, "host node": 1}) == ""
    assert "nothing computes" in contradiction({"host node": 1})


class RecordingGraph:
    """A CUDA graph that records the calls it gets."""

    calls: ClassVar[list[str]] = []

    def __init__(self, keep_graph=False):
        self.calls.append(f"keep={keep_graph}")

    def capture_begin(self, capture_error_mode, pool=None):
        self.calls.append("begin")

    def capture_end(self):
        self.calls.append("end")

    def instantiate(self):
        self.calls.append("instantiate")


@pytest.fixture
def recorded(monkeypatch):
    """Let torch capture into a `RecordingGraph`, and return its calls."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "CUDAGraph": RecordingGraph,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda given: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "current_device": lambda: 0,
        "graph_pool_handle": lambda: (0, 7),
        "mem_get_info": lambda: (100, 140),
        "memory_reserved": lambda: 30,
        "memory_allocated": lambda: 10,
        "empty_cache": lambda: RecordingGraph.calls.append("cache emptied"),
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda_graph, "abandoned", [])
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
    RecordingGraph.calls.clear()
    return RecordingGraph.calls


def test_a_captured_graph_keeps_its_nodes_and_is_instantiated(recorded):
    cuda_graph.capture_graph(lambda: recorded.append("run"))
    assert recorded == ["run", "keep=True", "begin", "run", "end", "instantiate"]


def test_a_captured_step_stays_alive(recorded, monkeypatch):
    """If the step were freed, its tensors would be freed too, and the graph still uses them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **options: contextlib.nullcontext())
    monkeypatch.setattr(cuda_graph, "_stream", lambda device: torch.cuda.current_stream())
    monkeypatch.setattr(RecordingGraph, "replay", lambda self: None, raising=False)
    cache = torch.ones(3)
    freed = []
    weakref.finalize(cache, lambda: freed.append("cache"))
    replay = cuda_graph.capture(functools.partial(torch.sum, cache))
    del cache
    gc.collect()
    assert float(replay()) == 3
    assert not freed


@pytest.mark.parametrize(("free", "reserved"), [(30, 30), (60, 80)])
def test_scarce_memory_is_released_before_a_capture(recorded, monkeypatch, free, reserved):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 140))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved)
    cuda_graph.capture_graph(lambda: None)
    assert recorded == ["keep=True", "cache emptied", "begin", "end", "instantiate"]


def test_a_graph_that_cannot_be_instantiated_is_uncapturable(recorded, monkeypatch):
    def fail(self):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(RecordingGraph, "instantiate", fail)
    allocator(monkeypatch, recorded, ended=True)
    with pytest.raises(cuda_graph.Uncapturable, match="out of memory"):
        cuda_graph.capture_graph(lambda: None)
    assert recorded[3:] == ["end", "keep=False", "begin", "end"]
    assert cuda_graph.abandoned == [(0, 7)]


def allocator(monkeypatch, recorded, *, ended):
    """Replace torch's allocator. It records calls, or raises if the capture has `ended`."""

    def function(name):
        def record(device, pool):
            if ended:
                raise RuntimeError("not currently recording to mempool_id")
            recorded.append(f"{name} {pool}")

        return record

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", function("stop"), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", function("release"), raising=False)


def test_a_failed_capture_is_reported_to_the_allocator(recorded, monkeypatch):
    allocator(monkeypatch, recorded, ended=False)

    def side():
        if recorded[-1:] == ["begin"]:
            raise ValueError("not while it is captured")

    with pytest.raises(cuda_graph.Uncapturable, match="not while it is captured"):
        cuda_graph.capture_graph(side)
    cleanup = ["stop (0, 7)", "release (0, 7)", "keep=False", "begin", "end"]
    assert recorded == ["keep=True", "begin", "end", *cleanup]


@pytest.mark.parametrize("fails_after", ["run", "begin"])
def test_a_side_that_runs_out_of_memory_fails_on_every_clock(recorded, monkeypatch, fails_after):
    allocator(monkeypatch, recorded, ended=True)

    def side():
        recorded.append("run")
        if fails_after in recorded:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        cuda_graph.capture_graph(side)
    assert cuda_graph.abandoned == ([(0, 7)] if fails_after == "begin" else [])
