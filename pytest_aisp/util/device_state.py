"""The state of a GPU and of this process during a measurement.

This includes pending work, free memory and garbage collection, the GPU's clocks, power and
throttling, and other processes on the GPU.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from . import device
from .cpu_load import descendants
from .device import query
from .gpu_lease import is_worker

THROTTLED = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""NVML's clock event reasons that make a measurement worthless.

The software power cap (0x4) is normal at full load.
"""

MPS_SERVER = "nvidia-cuda-mps"
"""The beginning of the name of MPS's processes. Linux cuts names to 15 characters."""


@contextmanager
def no_output() -> Iterator[None]:
    """Discard what this process and its children print inside the block."""
    kept = {fd: os.dup(fd) for fd in (1, 2)}
    nothing = os.open(os.devnull, os.O_WRONLY)
    _redirect(dict.fromkeys(kept, nothing))
    try:
        yield
    finally:
        _redirect(kept)
        for fd in (nothing, *kept.values()):
            os.close(fd)


def _redirect(targets: dict[int, int]) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for fd, target in targets.items():
        os.dup2(target, fd)


@contextmanager
def no_gc() -> Iterator[None]:
    """Turn off Python's garbage collector inside the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def synchronizer(device: str) -> Callable[[], None]:
    """Return a function that waits until `device` has finished its work."""
    if not device.startswith("cuda"):
        return lambda: None  # on a CPU, a call has finished when it returns
    import torch

    return torch.cuda.synchronize


def free_bytes() -> int:
    """Return the GPU's free memory, including unused memory that torch's allocator caches."""
    import torch

    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return int(torch.cuda.mem_get_info()[0]) + unused


def release(device: str, *, everything: bool = False) -> None:
    """Free unreferenced memory, so that the next buffers get different addresses.

    Args:
        everything: True to examine all objects, which takes about 0.1 s. If False, objects that
            refer to each other stay if they were in use during an earlier call.
    """
    import torch

    if everything:
        gc.unfreeze()
    gc.collect()
    gc.freeze()  # later collections skip torch's objects
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def total_bytes(device: str) -> int:
    """Return the bytes of memory of `device`."""
    import torch

    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Stopwatch:
    """Measure the seconds in each phase. An inner phase's time is not part of the outer phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phase, self._since = "other", time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside the block to the phase `name`."""
        outer = self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, name: str) -> str:
        now, before = time.perf_counter(), self._phase
        self.seconds[before] = self.seconds.get(before, 0.0) + now - self._since
        self._phase, self._since = name, now
        return before

    def start(self) -> None:
        """Start from zero for the next request."""
        self._since, self.seconds = time.perf_counter(), {}

    def read(self) -> dict[str, float]:
        """Return the seconds spent in each phase since the last reading, and reset them."""
        self._switch(self._phase)
        seconds, self.seconds = self.seconds, {}
        return {name: round(value, 4) for name, value in seconds.items()}


@dataclass(frozen=True)
class Look:
    """NVML's values for a GPU after `block` blocks."""

    block: int
    sm_mhz: int | None
    watts: int | None
    celsius: int | None


class Telemetry:
    """Clocks, power, temperature and throttling of one GPU while it is measured.

    An NVML call can take a millisecond. So NVML is normally read only after every `EVERY`-th block.
    While the GPU is disturbed, NVML is read after each block.
    """

    EVERY = 5

    def __init__(self, index: int) -> None:
        self._nvml, self._handle = _nvml_of(index)
        self._blocks, self._disturbed = 0, False
        self._looks: list[Look] = []
        self._read()

    def _read(self) -> int:
        """Record one reading of NVML, and return NVML's clock event reasons."""
        nvml, handle = self._nvml, self._handle
        if nvml is None or handle is None:
            return 0
        look = Look(
            self._blocks,
            query(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            (query(nvml.nvmlDeviceGetPowerUsage, handle) or 0) // 1000 or None,
            query(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        )
        self._looks.append(look)
        return query(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0

    def energy(self) -> float | None:
        """Return the joules that the GPU has used since its driver was loaded, or None."""
        nvml, handle = self._nvml, self._handle
        if nvml is None or handle is None:
            return None
        millijoules = query(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        return None if millijoules is None else millijoules * 1e-3

    def disturbance(self) -> str | None:
        """Return the reason why the GPU is too slow, or None. Some calls do not check the GPU."""
        self._blocks += 1
        return self.look() if self._disturbed or self._blocks % self.EVERY == 0 else None

    def look(self) -> str | None:
        """Return the reason why the GPU is too slow now, or None."""
        reasons = self._read()
        causes = [name for bit, name in THROTTLED.items() if reasons & bit]
        self._disturbed = bool(causes)
        return ", ".join(causes) or None

    def summary(self) -> dict[str, list[int] | None]:
        """Return the smallest and the largest reading of each quantity."""
        ranges: dict[str, list[int] | None] = {}
        for name in ("sm_mhz", "watts", "celsius"):
            values = [v for look in self._looks if (v := getattr(look, name)) is not None]
            ranges[name] = [min(values), max(values)] if values else None
        return ranges

    def looks(self) -> list[list[int | None]]:
        """Return each reading as a list: earlier blocks, MHz, watts and degrees Celsius."""
        return [[look.block, look.sm_mhz, look.watts, look.celsius] for look in self._looks]


def _nvml_of(index: int) -> tuple[ModuleType | None, object | None]:
    """Return NVML, and NVML's handle of torch's GPU with this index, or None for a missing one."""
    import torch

    nvml = device.load_nvml()
    uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    return nvml, nvml and query(nvml.nvmlDeviceGetHandleByUUID, uuid)


class OtherProcesses:
    """The other processes that compute on a GPU, if NVML shows them.

    If a container hides process ids, NVML does not list this process. Then its work cannot be
    distinguished from other processes' work, and no process is returned.
    """

    def __init__(self, index: int) -> None:
        self._nvml, self._handle = _nvml_of(index)
        self._asked_us = time.time_ns() // 1000
        self._lists_us: bool | None = None

    def shares(self) -> dict[str, float]:
        """Return each process's share of the GPU since the last call, keyed by process name."""
        nvml, handle, since = self._nvml, self._handle, self._asked_us
        self._asked_us = time.time_ns() // 1000
        if nvml is None or handle is None:
            return {}
        if self._lists_us is None:
            listed = query(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
            self._lists_us = os.getpid() in {process.pid for process in listed}
        if not self._lists_us:
            return {}
        samples = query(nvml.nvmlDeviceGetProcessUtilization, handle, since) or []
        ours = {os.getpid(), *descendants()}
        return {
            process_name(int(sample.pid)): sample.smUtil / 100
            for sample in samples
            if sample.timeStamp > since and sample.pid not in ours and is_foreign(sample.pid)
        }


def is_foreign(pid: int) -> bool:
    """Return whether `pid` is neither a worker process nor the server of CUDA's MPS.

    The server computes on behalf of its clients, and this process may be one of them.
    """
    return not is_worker(pid) and MPS_SERVER not in process_name(pid)


def process_name(pid: int) -> str:
    """Return a process's id and name as text, such as ``process 4242 (python3)``."""
    name = device.read_text(Path(f"/proc/{pid}/comm"))
    return f"process {pid} ({name})" if name else f"process {pid}"
