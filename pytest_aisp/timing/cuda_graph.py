"""What a captured CUDA graph contains: its nodes by type, as the driver tells them.

The nodes of child graphs are counted too. What is no node is not seen: kernels that a kernel
starts, graphs that are launched on the device, the bodies of conditional nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, Protocol

from ..checking.inputs import BoundSide
from ..isolation.protections import enabled
from ..page.pair import SideError
from ..util.process_group import current_group

PREFIX = "CU_GRAPH_NODE_TYPE_"
WORDS = {
    "HOST": "host node",
    "GRAPH": "child graph",
    "EMPTY": "empty node",
    "WAIT_EVENT": "event wait",
}
"""The driver's names that are not the field's; the others are only made lower case."""
IDLE = frozenset(
    (
        *("host node", "child graph", "empty node", "event wait", "event record"),
        *("mem alloc", "mem free", "ext semas signal", "ext semas wait"),
    )
)
"""Types of nodes that neither compute nor move data; a child graph's own nodes are counted."""
ROLES = ("baseline", "optimized")


class Uncounted(RuntimeError):
    """A graph whose nodes cannot be counted here; the message says why."""


class Captured(Protocol):
    """A window of calls in one graph."""

    subject: BoundSide
    calls: int

    def nodes(self) -> dict[str, int]: ...


def count(graph: Any) -> dict[str, int]:
    """Return how many nodes of each type a captured `torch.cuda.CUDAGraph` has.

    The graph must keep what it captured (``keep_graph=True``).

    Raises:
        Uncounted: without cuda.bindings, or where torch or the driver does not tell.

    Source: the CUDA driver API, "Graph Management".
    """
    try:
        driver = import_module("cuda.bindings.driver")
        found = _count(driver, driver.CUgraph(graph.raw_cuda_graph()))
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise Uncounted(why) from error
    return dict(sorted(found.items()))


def _count(driver: Any, graph: Any) -> Counter[str]:
    _, many = _asked(driver, "cuGraphGetNodes", graph)
    nodes, _ = _asked(driver, "cuGraphGetNodes", graph, many) if many else ((), 0)
    found: Counter[str] = Counter()
    for node in nodes:
        (kind,) = _asked(driver, "cuGraphNodeGetType", node)
        found[_word(kind.name)] += 1
        if kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH:
            (child,) = _asked(driver, "cuGraphChildGraphNodeGetGraph", node)
            found += _count(driver, child)
    return found


def _asked(driver: Any, function: str, *args: Any) -> tuple[Any, ...]:
    status, *found = getattr(driver, function)(*args)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise Uncounted(f"{function}: {status.name}")
    return tuple(found)


def _word(name: str) -> str:
    short = name.removeprefix(PREFIX)
    return WORDS.get(short, short.lower().replace("_", " "))


def contradiction(nodes: Mapping[str, int]) -> str:
    """Return why a graph of these nodes is not what the graph clock may time, or nothing."""
    if not enabled("graph-nodes"):
        return ""
    calls, every = nodes.get("host node", 0), sum(nodes.values())
    if current_group().world > 1:  # NCCL may put its own there, to drive a network
        calls = 0
    if calls:
        return (
            f"{calls} of the {every} nodes of its graph call the CPU back, whose work is no GPU's;"
            " declare bound='host' to have it judged as called"
        )
    if not nodes.keys() - IDLE:
        return (
            f"nothing computes in its graph of {every} nodes, so a replay does nothing;"
            " launch the work on the current stream at every call"
        )
    return ""


def check(windows: Iterable[Captured]) -> dict[str, Any]:
    """Return by side how many nodes of each type a call has, or why they are not counted.

    Raises:
        SideError: for a graph that calls the CPU back, or in which nothing computes.
    """
    found = {}
    for role, window in zip(ROLES, windows, strict=True):
        try:
            nodes = window.nodes()
        except Uncounted as error:
            return {"no graph_nodes": str(error)}
        if wrong := contradiction(nodes):
            raise SideError(f"{window.subject.name}: {wrong}")
        found[role] = {kind: many / window.calls for kind, many in nodes.items()}
    return {"graph_nodes": found}
