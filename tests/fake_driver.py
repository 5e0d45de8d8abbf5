"""A fake of `cuda.bindings.driver` that has only graphs and the memory of their nodes."""

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


class MemoryAttribute(enum.Enum):
    """Attributes of the memory of graphs, by the driver's names."""

    CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT = 0
    CU_GRAPH_MEM_ATTR_USED_MEM_HIGH = 1
    CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT = 2
    CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH = 3


class Result(enum.Enum):
    """Status codes of the driver."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class Driver:
    """A driver whose graphs are lists of node types. A nested list is a child graph.

    Args:
        fails: the function that fails.
        resets: False for a driver that does not reset the peak of the memory of graphs.
    """

    CUresult, CUgraphNodeType, CUgraphMem_attribute = Result, Type, MemoryAttribute
    cuuint64_t = int

    def __init__(self, fails="", *, resets=True):
        self.fails, self.resets = fails, resets
        self.memory = dict.fromkeys(MemoryAttribute, 0)
        self.unfreed = 0

    def use_graph_memory(self, used):
        """Launch a graph whose memory nodes use `used` bytes. All graphs share their memory."""
        for attribute, value in self.memory.items():
            pages = "RESERVED" in attribute.name and used  # the driver takes memory in pages
            self.memory[attribute] = max(value, self.unfreed + used + bool(pages))

    def keep_graph_memory(self, used):
        """Launch a graph with a memory node of `used` bytes that is not freed."""
        self.unfreed += used
        self.use_graph_memory(0)

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

    def cuDeviceGetGraphMemAttribute(self, device, attribute):
        return self._status("cuDeviceGetGraphMemAttribute"), self.memory[attribute]

    def cuDeviceSetGraphMemAttribute(self, device, attribute, value):
        assert (attribute, value) == (MemoryAttribute.CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, 0)
        if self.resets:
            now = self.memory[MemoryAttribute.CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT]
            self.memory[attribute] = now
        return (self._status("cuDeviceSetGraphMemAttribute"),)

    def cuDeviceGraphMemTrim(self, device):
        for attribute in MemoryAttribute:
            if "CURRENT" in attribute.name:
                self.memory[attribute] = self.unfreed
        return (self._status("cuDeviceGraphMemTrim"),)


def nodes(words):
    """Return the nodes of a graph, given as ``"KERNEL HOST"``."""
    return [Type[f"CU_GRAPH_NODE_TYPE_{word}"] for word in words.split()]


def graph(content, replay=None):
    """Return a captured graph that keeps its nodes."""
    return SimpleNamespace(raw_cuda_graph=lambda: content, replay=replay)
