"""Measure for a second how much other processes use this machine, for `aisp machine doctor`."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from types import ModuleType

from ..timing import neighbors
from ..timing.neighbors import NAMED, Neighbors
from ..util import device
from ..util.cpu_load import STOLEN, CpuReading, load_text, read_cpu
from .doctor import Finding, State

SECONDS, READINGS = 1.0, 5
"""The length of the measurement, and the number of times that NVML is read in it."""
CHAINS = 50
"""The number of chains of kernels that look for time slices, 5 ms each."""
CROWDED = 0.5
"""From this share of the cores on, other processes harm. Below, there are free cores."""
WAIT = "find and end it, or use another GPU: nvidia-smi"


def load_findings(nvml: ModuleType | None, cores: Collection[int]) -> Iterator[Finding]:
    """Measure the use of the cores and of the visible GPUs, while this process does nothing."""
    handles = device.visible_gpus(nvml)
    before, used = read_cpu(), dict[int, list[int]]()
    for _ in range(READINGS):
        time.sleep(SECONDS / READINGS)
        for number, handle in enumerate(handles):
            percent = device.query(_percent, nvml, handle)
            if percent is not None:
                used.setdefault(number, []).append(percent)
    yield from cpu_findings(before, read_cpu(), len(cores))
    for number, handle in enumerate(handles):
        name = f"GPU {nvml.nvmlDeviceGetIndex(handle)}" if nvml else ""
        yield utilization(f"{name} utilization", used.get(number, []))
        yield time_slices(f"{name} time slices", number)


def _percent(nvml: ModuleType, handle: object) -> int:
    return int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)


def cpu_findings(before: CpuReading, after: CpuReading, cores: int) -> Iterator[Finding]:
    """Yield the findings about other processes on the cores, and about the host's share."""
    seconds = after.at - before.at
    if before.busy is None or after.busy is None:
        yield Finding("CPU", "unread", f"the system hides other processes{load_text()}")
        return
    others = max(0.0, after.busy - before.busy - (after.own - before.own)) / seconds
    state: State = "harms" if others >= CROWDED * cores else "note"
    text = f"other processes use {others:.1f} of {cores} cores{load_text()}"
    if others < STOLEN * cores:
        yield Finding("CPU", "fine", text)
    else:
        yield Finding("CPU", state, text, "end them, or wait: top -o %CPU")
    stolen = (after.stolen - before.stolen) / (seconds * cores)
    if stolen > STOLEN:
        change = "use a virtual machine with cores of its own"
        yield Finding("steal", "harms", f"the host takes {stolen:.0%} of the CPU time", change)
    else:
        yield Finding("steal", "fine", f"the host takes {stolen:.0%} of the CPU time")


def utilization(name: str, percents: list[int]) -> Finding:
    """Return a finding about the GPU's utilization while this process did nothing on it."""
    if not percents:
        return Finding(name, "unread", "NVML gives no answer")
    most = max(percents)
    if most < 100 * NAMED:
        return Finding(name, "fine", f"{most} % in {SECONDS:g} s")
    return Finding(name, "harms", f"another process uses {most} % of this GPU", WAIT)


def time_slices(name: str, index: int) -> Finding:
    """Return a finding about the time slices of other processes on torch's GPU `index`."""
    import torch

    neighbors.slice_reader.cache_clear()  # it belongs to one GPU
    if not torch.cuda.is_available():
        return Finding(name, "unread", "torch cannot use this GPU")
    with torch.cuda.device(index):
        read = device.query(neighbors.slice_reader)
        if read is None:
            return Finding(name, "unread", "this machine compiles no CUDA C++")
        found = Neighbors(read)
        found.look(CHAINS)
    if not found.seen.total:
        return Finding(name, "unread", "the CPU is too busy to queue kernels without a pause")
    if found.share() < NAMED:
        return Finding(name, "fine", f"none in {found.seen.total * 1e3:.0f} ms")
    return Finding(name, "harms", found.text(), WAIT)
