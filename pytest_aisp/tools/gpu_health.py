"""The GPUs' part of `aisp doctor`, as NVML and the driver's files say it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ..util import device
from ..util.device import THROTTLED, _asked, said
from ..worker import nvidia_tools
from .doctor import Finding, unread

SHARED, ALONE = 0, 3
"""NVML's compute modes: any number of processes on a GPU, one alone; 2 is none at all."""
SM, LOCKED = 1, 0x2
"""NVML's clock of the processors, and the reason that a clock was set (-lgc, -ac)."""
NO_GPU = "NVML finds no GPU, or its driver is not loaded: nothing is known of GPUs"


def findings(nvml: Any | None, root: Path, cores: Collection[int]) -> Iterator[Finding]:
    """Yield what there is to say of the visible GPUs.

    Args:
        nvml: pynvml, initialised, or None where there is none.
        root: where ``proc`` and ``sys`` lie.
        cores: CPUs that this process may use.
    """
    handles = [] if nvml is None else [h for h in device._handles(nvml) if device._visible(nvml, h)]
    if nvml is None or not handles:
        yield unread("GPU", NO_GPU)
        return
    yield Finding("driver", "fine", str(nvml.nvmlSystemGetDriverVersion()))
    for handle in handles:
        name = f"GPU {nvml.nvmlDeviceGetIndex(handle)}"
        yield Finding(name, "fine", str(nvml.nvmlDeviceGetName(handle)))
        asked = _Gpu(nvml, handle, name)
        yield from (asked.clocks(), asked.throttling(), asked.power(), asked.persistence())
        yield from (asked.ecc(), asked.mig(), asked.compute_mode(), asked.others())
        yield asked.numa(root, cores)
    yield counters(root)


class _Gpu:
    """Questions about one GPU."""

    def __init__(self, nvml: Any, handle: Any, name: str) -> None:
        self._nvml, self._handle, self._name = nvml, handle, name

    def _ask(self, question: str, *more: Any) -> Any:
        asked = getattr(self._nvml, question, None)
        return None if asked is None else _asked(asked, self._handle, *more)

    def _finding(self, what: str, state: str, text: str, change: str = "") -> Finding:
        return Finding(f"{self._name} {what}", state, text, change)

    def _unread(self, what: str) -> Finding:
        return unread(f"{self._name} {what}", "NVML does not say")

    def clocks(self) -> Finding:
        now = self._ask("nvmlDeviceGetClockInfo", SM)
        most = self._ask("nvmlDeviceGetMaxClockInfo", SM)
        if now is None or most is None:
            return self._unread("clocks")
        text = f"SM at {now} MHz now, {most} at most"
        if (self._ask("nvmlDeviceGetCurrentClocksEventReasons") or 0) & LOCKED:
            change = "sudo nvidia-smi -rgc && sudo nvidia-smi -rac, unless it is meant"
            return self._finding("clocks", "note", f"{text}, held by a clock that was set", change)
        return self._finding("clocks", "fine", text)

    def throttling(self) -> Finding:
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            return self._unread("throttling")
        names = [name for bit, name in THROTTLED.items() if reasons & bit]
        if not names:
            return self._finding("throttling", "fine", "none now")
        change = "look after cooling and power: nvidia-smi -q -d PERFORMANCE"
        return self._finding("throttling", "harms", ", ".join(names), change)

    def power(self) -> Finding:
        now = self._ask("nvmlDeviceGetEnforcedPowerLimit")
        default = self._ask("nvmlDeviceGetPowerManagementDefaultLimit")
        if now is None:
            return self._unread("power")
        text = f"limit {now // 1000} W"
        if default is None or now >= default:
            return self._finding("power", "fine", text)
        change = f"sudo nvidia-smi -pl {default // 1000}, unless it is meant"
        return self._finding("power", "note", f"{text}, by default {default // 1000} W", change)

    def persistence(self) -> Finding:
        on = self._ask("nvmlDeviceGetPersistenceMode")
        if on is None:
            return self._unread("persistence")
        if on:
            return self._finding("persistence", "fine", "on")
        text = "off: the driver unloads between processes, each starts it anew"
        return self._finding("persistence", "note", text, "sudo nvidia-smi -pm 1")

    def ecc(self) -> Finding:
        modes = self._ask("nvmlDeviceGetEccMode")  # now, and after the next reset
        if modes is None:
            return self._unread("ECC")
        now, pending = ("on" if mode else "off" for mode in modes)
        if now == pending:
            return self._finding("ECC", "fine", now)
        text = f"{now}, and {pending} after the next reset: results will not compare"
        return self._finding("ECC", "note", text, "record again after the reset")

    def mig(self) -> Finding:
        modes = self._ask("nvmlDeviceGetMigMode")
        if modes is None:
            return self._finding("MIG", "fine", "this GPU has none")
        if not modes[0]:
            return self._finding("MIG", "fine", "off")
        text = "on: slices share the memory, and their results are those of no whole GPU"
        return self._finding("MIG", "note", text, "measure on a GPU that is not divided")

    def compute_mode(self) -> Finding:
        mode = self._ask("nvmlDeviceGetComputeMode")
        if mode is None:
            return self._unread("compute mode")
        if mode == SHARED:
            return self._finding("compute mode", "fine", "default")
        text = {ALONE: "exclusive: a vote's process cannot start beside the first one"}.get(
            mode, "prohibited: no process may compute here"
        )
        return self._finding("compute mode", "harms", text, "sudo nvidia-smi -c 0")

    def others(self) -> Finding:
        found = self._ask("nvmlDeviceGetComputeRunningProcesses")
        if found is None:
            return self._unread("processes")
        pids = [p.pid for p in found if p.pid != os.getpid() and not device._is_bench(p.pid)]
        if not pids:
            return self._finding("processes", "fine", "no other computes here")
        text = f"others compute here: {', '.join(map(str, pids))}"
        return self._finding("processes", "harms", text, "wait for them, or measure elsewhere")

    def numa(self, root: Path, cores: Collection[int]) -> Finding:
        pci = self._ask("nvmlDeviceGetPciInfo")
        bus = "" if pci is None else pci.busId
        text = bus.decode() if isinstance(bus, bytes) else str(bus)
        folder = root / "sys/bus/pci/devices"
        node = device.numa_node(text.strip("\0"), folder) if text else None
        near = said(root / f"sys/devices/system/node/node{node}/cpulist")
        if node is None or near is None:
            return unread(f"{self._name} NUMA", "the system does not say where it is")
        if set(cores) & cpus_of(near):
            return self._finding("NUMA", "fine", f"node {node}, CPUs {near}")
        change = f"numactl --cpunodebind={node} --membind={node} pytest ..."
        far = f"node {node}, CPUs {near}; this process may use none of them"
        return self._finding("NUMA", "harms", far, change)


def cpus_of(text: str) -> set[int]:
    """Return the numbers of ``0-3,8``."""
    spans = [part.partition("-") for part in text.split(",") if part]
    return {n for a, _, b in spans for n in range(int(a), int(b or a) + 1)}


def counters(root: Path, *, admin: bool | None = None) -> Finding:
    """Return whether `ncu` may read the GPU's performance counters."""
    text = said(root / "proc/driver/nvidia/params")
    if text is None:
        return unread("counters", f"{root / 'proc/driver/nvidia/params'} cannot be read")
    if "RmProfilingAdminOnly: 1" not in text:
        return Finding("counters", "fine", "every user may read them")
    if os.geteuid() == 0 if admin is None else admin:
        return Finding("counters", "fine", "for administrators only, as this one is")
    return Finding("counters", "note", *nvidia_tools.COUNTERS.split("\n", 1))
