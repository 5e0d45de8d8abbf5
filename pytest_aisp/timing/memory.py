"""Measure the GPU memory that a call of a side needs beyond its inputs."""

from __future__ import annotations

import time
from contextlib import closing
from importlib import import_module

from ..checking.inputs import BoundSide, InputPool, alone, one_slot
from ..page.pair import Side
from ..util.device_state import release
from ..util.process_group import current_group

WATCHDOG = 0.25
"""Seconds to wait for NCCL's watchdog, which polls every 0.1 s and has seen every send by then."""


class GraphMemory:
    """The memory that the driver gives to the memory nodes of graphs on the current GPU.

    During a capture, `cudaMallocAsync` adds a memory node to the graph. torch's statistics do not
    include the memory of these nodes. A driver that does not report this memory has no memory
    nodes, so all amounts are then 0.

    Source: the CUDA programming guide, "Graph Memory Nodes".
    """

    def __init__(self) -> None:
        import torch

        self._device, self._mark = torch.cuda.current_device(), 0

    def used(self) -> int:
        """Return the bytes that graphs use. A graph keeps its memory between launches."""
        return self._read("USED_MEM_CURRENT")

    def reserved(self) -> int:
        """Return the bytes that the driver has taken from the GPU for memory nodes."""
        return self._read("RESERVED_MEM_CURRENT")

    def trim(self) -> None:
        """Free the memory of idle graphs. The next launch of a graph allocates memory again."""
        self._call("cuDeviceGraphMemTrim")

    def start_peak(self) -> None:
        """Begin the period whose peak `peak` returns."""
        self._call("cuDeviceSetGraphMemAttribute", "USED_MEM_HIGH", 0)
        self._mark = self._read("USED_MEM_HIGH")

    def peak(self) -> int:
        """Return the peak of `used` since `start_peak`.

        Some platforms do not reset the driver's peak, according to the tests of cuda.core. A peak
        that has not risen may be older, so it is ignored.
        """
        high = self._read("USED_MEM_HIGH")
        return high if high > self._mark else self.used()

    def _read(self, attribute: str) -> int:
        return self._call("cuDeviceGetGraphMemAttribute", attribute)

    def _call(self, function: str, attribute: str = "", value: int | None = None) -> int:
        """Call the driver and return the result, or 0 if there is no driver or the call fails."""
        try:
            driver = import_module("cuda.bindings.driver")
            args: list[object] = [self._device]
            if attribute:
                args.append(getattr(driver.CUgraphMem_attribute, f"CU_GRAPH_MEM_ATTR_{attribute}"))
            if value is not None:
                args.append(driver.cuuint64_t(value))
            status, *results = getattr(driver, function)(*args)
        except (ImportError, RuntimeError):  # cuda.bindings or the driver is not installed
            return 0
        succeeded = status == driver.CUresult.CUDA_SUCCESS
        return int(results[0]) if succeeded and results else 0


def drop_sent_tensors() -> None:
    """Wait for the GPU, and make each rank free the tensors that it has sent.

    NCCL's process group keeps a tensor until the watchdog has seen the end of the send, and the
    next collective has begun. Without this function, tensors of one side would be included in the
    memory of the next side.
    """
    import torch

    torch.cuda.synchronize()
    if current_group().world > 1:
        time.sleep(WATCHDOG)
        current_group().start_window("cuda")
        torch.cuda.synchronize()


def peak_bytes(side: BoundSide) -> int:
    """Return the peak GPU memory of one call beyond its inputs, in bytes.

    This includes the outputs, the memory that the side's preparation keeps, and the memory nodes of
    its graphs. Memory kept since an earlier call, temporaries that torch allocated during a
    capture, and other memory that torch did not allocate are not included.
    """
    import torch

    drop_sent_tensors()
    graphs = GraphMemory()
    graphs.trim()  # so that the side cannot reuse memory of the other side's graphs
    torch.cuda.reset_peak_memory_stats()
    graphs.start_peak()
    before = torch.cuda.memory_allocated() + graphs.used()
    side.run(0)
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.synchronize()
    peak += graphs.peak()
    side.restore()
    return int(current_group().max(float(side.held_bytes + peak - before)))


def allocated(pool: InputPool, side: Side) -> float:
    """Return the peak GPU memory of calls of `side` beyond inputs and state, in bytes.

    This includes outputs, temporaries, the memory that preparation keeps, memory that the first
    call leaves for the second, such as an optimizer's moments, and the memory nodes of graphs. With
    several ranks, this is the peak of the rank that needs the most memory.
    """
    return current_group().max(_peaks(pool, side)[0])


def reserved(pool: InputPool, side: Side) -> float:
    """Return the most bytes of GPU memory that the allocator reserves during calls of `side`.

    This includes the initial state, and the memory that the driver reserves for memory nodes of
    graphs, but not the inputs.
    """
    return current_group().max(_peaks(pool, side)[1])


def fragmentation(pool: InputPool, side: Side) -> float:
    """Return the peak of reserved GPU memory for `side`, minus its peak of allocated memory."""
    held, taken = _peaks(pool, side)
    return current_group().max(max(0.0, taken - held))


def _peaks(pool: InputPool, side: Side) -> tuple[float, float]:
    """Return the peaks of allocated and of reserved memory during calls of `side`, in bytes.

    The side has run before, so the workspaces of libraries already exist and are not included.
    Allocated memory is measured at the second call. Reserved memory is measured from the first call
    on, because the allocator and the driver's pool for graphs keep it.
    """
    import torch

    graphs = GraphMemory()
    with alone(pool, side) as bound:
        _allocated_by_second_call(bound, graphs)

    drop_sent_tensors()
    release(pool.device)
    with one_slot(pool):
        torch.cuda.synchronize()
        graphs.trim()
        in_graphs = graphs.used()
        before = torch.cuda.memory_reserved() + graphs.reserved()
        with closing(pool.bind(side)) as bound:
            held = _allocated_by_second_call(bound, graphs) - in_graphs
            torch.cuda.synchronize()
            return held, float(torch.cuda.memory_reserved() + graphs.reserved() - before)


def _allocated_by_second_call(side: BoundSide, graphs: GraphMemory) -> float:
    """Return the peak of allocated memory in a second call, in bytes.

    Inputs and state do not count. The memory that graphs hold in their memory nodes counts in full.
    """
    import torch

    before = torch.cuda.memory_allocated() - side.held_bytes
    side.run(0)
    side.outputs[0] = None
    drop_sent_tensors()
    torch.cuda.reset_peak_memory_stats()
    graphs.start_peak()
    side.run(0)
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() + graphs.peak() - before)
