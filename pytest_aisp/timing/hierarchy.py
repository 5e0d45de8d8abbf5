"""Measure the memory hierarchy of a GPU: the bandwidth and the latency of each level.

Latency is the time of one load in a chain of loads. Each load needs the result of the previous
load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import quantiles
from typing import TYPE_CHECKING

from ..results.task_results import HierarchyResult, Level
from . import unit_probes
from .cuda_graph import GraphWindow
from .cuda_timer import WINDOW
from .measure_peaks import seconds_per_run

if TYPE_CHECKING:
    import torch

LINE = 32
"""Numbers of 4 bytes in a line of 128 bytes. A list has one link per line."""
STEPS, LINES, LINKS = 4096, 2048, 4096
BLOCK, ROUNDS, VECTOR = unit_probes.BLOCK, unit_probes.ROUNDS, unit_probes.VECTOR
DRAM_SETS = 128
"""The working set for DRAM (at least 32 L2s), as a multiple of the largest one for the L2."""
L1_BYTES = 16 << 10
"""Bytes that fit in the L1 of every known GPU, next to other data."""
HOST_BYTES, HOST_ROUNDS = 256 << 20, 16
"""The working set in host memory, larger than any L2, and the rounds in which it is read."""
OPERANDS = 12
"""Bytes of the three operands of a multiply-add."""


def measure() -> HierarchyResult:
    """Measure the levels of the current GPU, and loads from working sets of growing size."""
    import torch

    from ..kernels.cuda_cpp import cuda_module

    kernels = cuda_module("hierarchy.cu")
    gpu = torch.cuda.get_device_properties()
    out = torch.zeros(2, device="cuda")
    word = out.view(torch.int32)
    grid = unit_probes.BLOCKS_PER_SM * gpu.multi_processor_count
    threads = grid * BLOCK

    def chased(links: torch.Tensor, *, past_l1: bool = True) -> float:
        at = torch.zeros(1, device="cuda", dtype=torch.int32)
        return seconds(partial(kernels.chase[1, 1], links, at, STEPS, past_l1)) / STEPS

    multiply = unit_probes.multiply_adds()
    chain = partial(kernels.dependent_multiply_adds[1, 1], out, 8 * STEPS)
    shared_list = linked(LINKS, 1)
    shared_chain = partial(kernels.chase_shared[1, 1], shared_list, word, LINKS, 8 * STEPS)
    shared = unit_probes.shared_read()
    vectors = L1_BYTES // VECTOR
    table = torch.zeros(4 * vectors, device="cuda", dtype=torch.int32)
    cached = partial(kernels.read_cached[grid, BLOCK], table, word, vectors, ROUNDS)
    levels = [
        Level(
            "registers",
            0,
            multiply.amount / 2 * OPERANDS / seconds(multiply.run),
            seconds(chain) / (8 * STEPS),
        ),
        Level(
            "shared memory",
            0,
            shared.amount / seconds(shared.run),
            seconds(shared_chain) / (8 * STEPS),
        ),
        Level(
            "L1",
            L1_BYTES,
            4 * ROUNDS * VECTOR * threads / seconds(cached),
            chased(list_of(L1_BYTES), past_l1=False),
        ),
    ]
    sizes = unit_probes.l2_working_sets(gpu.L2_cache_size)
    for size in (*sizes, DRAM_SETS * sizes[-1]):  # both probes use exactly these sizes
        name = "L2" if size < gpu.L2_cache_size else "DRAM"
        levels.append(Level(name, size, read_rate(size), chased(list_of(size))))
    host = on_gpu(list_of(HOST_BYTES, "cpu").pin_memory())
    read = cuda_module("unit_probes.cu").l2_read[grid, BLOCK]
    reading = partial(read, host, word[:1], HOST_BYTES // VECTOR, HOST_ROUNDS)
    rate = 4 * HOST_ROUNDS * VECTOR * threads / seconds(reading)
    levels.append(Level("pinned host memory", HOST_BYTES, rate, chased(host)))
    cycles = torch.zeros(LINES, device="cuda", dtype=torch.int32)
    lines = torch.zeros(LINES * LINE, device="cuda", dtype=torch.int32)
    kernels.line_latencies[1, 1](lines, cycles, LINES)
    return HierarchyResult(levels, *near_and_far(cycles.tolist()))


class _Address:
    """The address of pinned int32 memory, in the form in which torch accepts GPU memory."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self.pinned = pinned  # so that the memory is not freed
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape),
            "typestr": "<i4",
            "data": (pinned.data_ptr(), False),
            "version": 3,
        }


def on_gpu(pinned: torch.Tensor) -> torch.Tensor:
    """Return a GPU tensor on `pinned` int32 host memory, which the GPU reads over its link."""
    import torch

    return torch.as_tensor(_Address(pinned), device="cuda")


def list_of(nbytes: int, device: str = "cuda") -> torch.Tensor:
    """Return a list of `nbytes` with one link per line."""
    return linked(nbytes // (4 * LINE), LINE, device)


def near_and_far(cycles: Sequence[int]) -> tuple[float, float]:
    """Return the latencies, in cycles, at the first and the last decile of all lines."""
    tenths = quantiles(cycles, n=10)
    return tenths[0], tenths[-1]


def linked(count: int, stride: int, device: str = "cuda") -> torch.Tensor:
    """Return a circular list of `count` links in random order.

    Link `i` is at index `i * stride`. The value of a link is the index of the next link.
    """
    import torch

    order = torch.randperm(count, device=device)
    links = torch.zeros(count * stride, device=device, dtype=torch.int32)
    links[order * stride] = (order.roll(-1) * stride).to(torch.int32)
    return links


def read_rate(nbytes: int) -> float:
    """Return the bytes per second that all SMs read from a table of `nbytes`, bypassing the L1."""
    probe = unit_probes.read_past_l1(nbytes)
    return probe.amount / seconds(probe.run)


def seconds(run: Callable[[], object]) -> float:
    """Return the seconds of one launch."""
    return seconds_per_run(GraphWindow, WINDOW["graph"], run)
