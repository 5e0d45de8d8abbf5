"""What a captured graph contains, by a driver that is only told of; and which one is refused."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
from drivers import Driver, graph
from drivers import nodes as kinds

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
    """Put a driver in the place of the real one."""

    def install(fails=""):
        monkeypatch.setattr(cuda_graph, "import_module", lambda name: Driver(fails))

    install()
    return install


def window(*content, calls=2, name="side"):
    counted = cuda_graph.count_nodes
    made = graph(list(content))
    subject = SimpleNamespace(name=name)
    return SimpleNamespace(side=subject, calls=calls, nodes=lambda: counted(made))


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
    found = count_nodes(graph([*kinds("KERNEL"), inner]))
    assert found == {"kernel": 2, "memset": 1, "host node": 1, "child graph": 2}


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

    def absent(name):
        raise ImportError(f"No module named '{name}'")

    monkeypatch.setattr(cuda_graph, "import_module", absent)
    found = check_nodes([window(*kinds("HOST")), window(*kinds("HOST"))])
    assert found == {"no graph_nodes": "No module named 'cuda.bindings.driver'"}


def test_host_nodes_are_refused_in_child_graphs_too(driver):
    called_back = "side: 1 of the 3 nodes of its graph call the CPU back, whose work is no GPU's"
    for content in (kinds("KERNEL HOST KERNEL"), [*kinds("KERNEL"), kinds("HOST")]):
        with pytest.raises(SideError, match=f"{called_back}; declare bound='host' to have it"):
            check_nodes([window(*kinds("KERNEL")), window(*content)])
        with without(["graph-nodes"]):
            assert check_nodes([window(*kinds("KERNEL")), window(*content)])["graph_nodes"]


@pytest.mark.parametrize("words", ["", "EMPTY", "EVENT_RECORD WAIT_EVENT", "MEM_ALLOC MEM_FREE"])
def test_a_graph_in_which_nothing_computes_is_refused(driver, words):
    idle = window(*kinds(words), name="idle")
    many = len(words.split())
    with pytest.raises(SideError, match=f"^idle: nothing computes in its graph of {many} nodes, "):
        check_nodes([idle, window(*kinds("KERNEL"))])
    with without(["graph-nodes"]):
        assert "graph_nodes" in check_nodes([idle, idle])


@pytest.mark.parametrize("words", ["KERNEL", "MEMCPY", "MEMSET", "CONDITIONAL"])
def test_nodes_that_compute_or_move_data_are_accepted(words):
    assert contradiction({node_name(words): 1}) == ""


def test_a_child_graph_counts_by_its_own_nodes(driver):
    assert check_nodes([window(kinds("KERNEL")), window(*kinds("KERNEL"))])
    with pytest.raises(SideError, match="nothing computes"):
        check_nodes([window(kinds("EMPTY")), window(*kinds("KERNEL"))])


def test_counts_are_per_call_and_side(driver):
    found = check_nodes([window(*kinds("KERNEL " * 6)), window(*kinds("KERNEL MEMSET MEMSET"))])
    assert found == {
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
