"""A fake of `cuda.bindings.driver` that has only graphs."""

from __future__ import annotations

import enum
from types import SimpleNamespace


class Type(enum.Enum):
    """Node types by the driver's names."""

    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1
    CU_GRAPH_NODE_TYPE_MEMSET = 2
    CU_GRAPH_NODE_TYPE_HOST = 3
    CU_GRAPH_NODE_TYPE_GRAPH = 4
    CU_GRAPH_NODE_TYPE_EMPTY = 5
    CU_GRAPH_NODE_TYPE_WAIT_EVENT = 6
    CU_GRAPH_NODE_TYPE_EVENT_RECORD = 7
    CU_GRAPH_NODE_TYPE_MEM_ALLOC = 10
    CU_GRAPH_NODE_TYPE_MEM_FREE = 11
    CU_GRAPH_NODE_TYPE_CONDITIONAL = 13


class Result(enum.Enum):
    """Status codes of the driver."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class Driver:
    """A driver whose graphs are lists of node types. A nested list is a child graph."""

    CUresult, CUgraphNodeType = Result, Type

    def __init__(self, fails=""):
        self.fails = fails

    def CUgraph(self, raw):
        return raw

    def _status(self, function):
        failed = function == self.fails
        return Result.CUDA_ERROR_INVALID_VALUE if failed else Result.CUDA_SUCCESS

    def cuGraphGetNodes(self, graph, numNodes=0):
        return self._status("cuGraphGetNodes"), graph[:numNodes], len(graph)

    def cuGraphNodeGetType(self, node):
        kind = Type.CU_GRAPH_NODE_TYPE_GRAPH if isinstance(node, list) else node
        return self._status("cuGraphNodeGetType"), kind

    def cuGraphChildGraphNodeGetGraph(self, node):
        return self._status("cuGraphChildGraphNodeGetGraph"), node


def nodes(words):
    """Return the nodes of a graph, given as ``"KERNEL HOST"``."""
    return [Type[f"CU_GRAPH_NODE_TYPE_{word}"] for word in words.split()]


def graph(content, replay=None):
    """Return a captured graph that keeps its nodes."""
    return SimpleNamespace(raw_cuda_graph=lambda: content, replay=replay)
