"""`aisp machine doctor`: find what disturbs measurements on this machine, and suggest fixes."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from ..util import device
from ..util.cli_result import CliResult, columns
from ..util.device import read_text
from ..util.device_state import THROTTLED
from ..util.gpu_lease import is_worker
from ..worker import nvidia_tools
from .host_findings import Finding, State, host_findings, load_findings, process_findings

LABELS: dict[State, str] = {"fine": "fine", "note": "note", "harms": "HARMS", "unread": "?"}


def examine() -> list[Finding]:
    """Run all checks on this machine and return their findings."""
    root, cores, nvml = Path("/"), device.cores_here(), device.load_nvml()
    found = [*gpu_findings(nvml, root, cores), *host_findings(root, cores)]
    found += process_findings(root, cores, os.environ)
    return [*found, *load_findings(nvml, cores)]


def doctor_result(findings: Sequence[Finding], *, as_json: bool) -> CliResult:
    """Return the findings as text. The exit code is 1 if something harms measurements."""
    states = [finding.state for finding in findings]
    harms, unread = states.count("harms"), states.count("unread")
    code = 1 if harms else 0
    if as_json:
        text = msgspec.json.format(msgspec.json.encode(findings), indent=1).decode()
        return CliResult([text], code)
    rows = columns([(LABELS[f.state], f.name, f.text) for f in findings])
    lines = []
    for row, finding in zip(rows, findings, strict=True):
        lines += [row, *(f"         {change}" for change in finding.change.splitlines())]
    summary = f"{harms} of {len(findings)} findings harm measurements" if harms else "nothing harms"
    summary += f"; {unread} could not be read" if unread else ""
    return CliResult([*lines, summary], code)


COMMAND = re.compile(r"(?:^|: )((?:sudo|echo|pip|ulimit|export|unset) .+)$")
"""Matches a command at the end of a finding's `change` if it can run unmodified."""
OF_A_SHELL = ("ulimit", "export", "unset")


def fix_script(findings: Sequence[Finding]) -> CliResult:
    """Return a shell script with the commands that fix the findings. Nothing is run."""
    machine, shell, manual = list[str](), list[str](), list[str]()
    for finding in findings:
        if finding.state not in ("note", "harms") or not finding.change:
            continue
        found = COMMAND.search(finding.change.splitlines()[-1])
        about = f"# {finding.name}: {finding.text}"
        if found is None:
            manual += [about, *(f"#   {line}" for line in finding.change.splitlines())]
        else:
            (shell if found[1].startswith(OF_A_SHELL) else machine).extend([about, found[1]])
    lines = ["#!/bin/sh", "# Read this before you run it. No command has been run.", "set -eu"]
    if shell:
        lines += ["", "# These change one shell. Put them where you start pytest."]
        lines += [line if line.startswith("#") else f"# {line}" for line in shell]
    lines += ["", *machine] if machine else []
    lines += ["", "# These have no command.", *manual] if manual else []
    if len(lines) == 3:
        lines.append("# Nothing to change.")
    return CliResult(lines, 0)


COMPUTE_DEFAULT, COMPUTE_EXCLUSIVE = 0, 3
"""NVML's compute modes in which a GPU allows many processes or only one. Mode 2 allows none."""
SM, LOCKED = 1, 0x2
"""NVML's constants for the SM clock, and for clocks limited by `nvidia-smi -lgc` or `-ac`."""
NO_GPU = "NVML finds no GPU, or its driver is not loaded"


def gpu_findings(nvml: ModuleType | None, root: Path, cores: Collection[int]) -> Iterator[Finding]:
    """Yield the findings about the visible GPUs."""
    handles = device.visible_gpus(nvml)
    if nvml is None or not handles:
        yield Finding("GPU", "unread", NO_GPU)
        return
    yield Finding("driver", "fine", str(nvml.nvmlSystemGetDriverVersion()))
    for handle in handles:
        name = f"GPU {nvml.nvmlDeviceGetIndex(handle)}"
        yield Finding(name, "fine", str(nvml.nvmlDeviceGetName(handle)))
        gpu = _Gpu(nvml, handle, name)
        yield from (gpu.clocks(), gpu.throttling(), gpu.power(), gpu.persistence())
        yield from (gpu.ecc(), gpu.mig(), gpu.compute_mode(), gpu.processes())
        yield from gpu.places(root, cores)
    yield counters(root)


class _Gpu:
    """The checks of one GPU. Each public method returns or yields findings."""

    def __init__(self, nvml: ModuleType, handle: object, name: str) -> None:
        self._nvml, self._handle, self._name = nvml, handle, name

    def _query(self, function: str, *args: object) -> Any:
        """Return the result of an NVML function, or None if it fails."""
        return device.query(lambda: getattr(self._nvml, function)(self._handle, *args))

    def _finding(self, name: str, state: State, text: str, change: str = "") -> Finding:
        return Finding(f"{self._name} {name}", state, text, change)

    def _unread(self, name: str) -> Finding:
        return self._finding(name, "unread", "NVML gives no answer")

    def clocks(self) -> Finding:
        now = self._query("nvmlDeviceGetClockInfo", SM)
        most = self._query("nvmlDeviceGetMaxClockInfo", SM)
        if now is None or most is None:
            return self._unread("clocks")
        text = f"SM at {now} MHz now, {most} at most"
        if (self._query("nvmlDeviceGetCurrentClocksEventReasons") or 0) & LOCKED:
            change = "unless you want this: sudo nvidia-smi -rgc && sudo nvidia-smi -rac"
            return self._finding("clocks", "note", f"{text}, limited by a user setting", change)
        return self._finding("clocks", "fine", text)

    def throttling(self) -> Finding:
        reasons = self._query("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            return self._unread("throttling")
        names = [name for bit, name in THROTTLED.items() if reasons & bit]
        if not names:
            return self._finding("throttling", "fine", "none now")
        change = "check cooling and power: nvidia-smi -q -d PERFORMANCE"
        return self._finding("throttling", "harms", ", ".join(names), change)

    def power(self) -> Finding:
        now = self._query("nvmlDeviceGetEnforcedPowerLimit")
        default = self._query("nvmlDeviceGetPowerManagementDefaultLimit")
        if now is None:
            return self._unread("power")
        text = f"limit {now // 1000} W"
        if default is None or now >= default:
            return self._finding("power", "fine", text)
        change = f"unless you want this: sudo nvidia-smi -pl {default // 1000}"
        return self._finding("power", "note", f"{text}, default {default // 1000} W", change)

    def persistence(self) -> Finding:
        on = self._query("nvmlDeviceGetPersistenceMode")
        if on is None:
            return self._unread("persistence")
        if on:
            return self._finding("persistence", "fine", "on")
        text = "off: the driver unloads between processes, and each one loads it again"
        return self._finding("persistence", "note", text, "sudo nvidia-smi -pm 1")

    def ecc(self) -> Finding:
        # the current ECC mode, and the mode after the next reset
        modes = self._query("nvmlDeviceGetEccMode")
        if modes is None:
            return self._unread("ECC")
        now, pending = ("on" if mode else "off" for mode in modes)
        if now == pending:
            return self._finding("ECC", "fine", now)
        text = f"{now}, but {pending} after the next reset: times before and after will differ"
        return self._finding("ECC", "note", text, "record the results again after the reset")

    def mig(self) -> Finding:
        modes = self._query("nvmlDeviceGetMigMode")
        if modes is None:
            return self._finding("MIG", "fine", "this GPU has none")
        if not modes[0]:
            return self._finding("MIG", "fine", "off")
        text = "on: slices share the memory, and their times are not those of a whole GPU"
        return self._finding("MIG", "note", text, "measure on a GPU without MIG")

    def compute_mode(self) -> Finding:
        mode = self._query("nvmlDeviceGetComputeMode")
        if mode is None:
            return self._unread("compute mode")
        if mode == COMPUTE_DEFAULT:
            return self._finding("compute mode", "fine", "default")
        text = "prohibited: no process may compute here"
        if mode == COMPUTE_EXCLUSIVE:
            text = "exclusive: no second process can start for a remeasurement"
        return self._finding("compute mode", "harms", text, "sudo nvidia-smi -c 0")

    def processes(self) -> Finding:
        processes = self._query("nvmlDeviceGetComputeRunningProcesses")
        if processes is None:
            return self._unread("processes")
        pids = [p.pid for p in processes if p.pid != os.getpid() and not is_worker(p.pid)]
        if not pids:
            return self._finding("processes", "fine", "no other process uses this GPU")
        text = f"other processes use this GPU: {', '.join(map(str, pids))}"
        return self._finding("processes", "harms", text, "wait for them, or use another GPU")

    def places(self, root: Path, cores: Collection[int]) -> Iterator[Finding]:
        """Yield findings about the NUMA nodes of the GPU, its interrupts, and this process."""
        pci = self._query("nvmlDeviceGetPciInfo")
        bus = "" if pci is None else pci.busId
        text = (bus.decode() if isinstance(bus, bytes) else str(bus)).strip("\0")
        folder = root / "sys/bus/pci/devices"
        node = device.numa_node(text, folder) if text else None
        near = read_text(root / f"sys/devices/system/node/node{node}/cpulist")
        if node is None or near is None:
            yield self._finding("NUMA", "unread", "the system does not know the node")
            return
        if set(cores) & cpus_of(near):
            yield self._finding("NUMA", "fine", f"node {node}, CPUs {near}")
        else:
            change = f"numactl --cpunodebind={node} --membind={node} pytest ..."
            far = f"node {node}, CPUs {near}; this process may use none of them"
            yield self._finding("NUMA", "harms", far, change)
        # PCI addresses begin with a domain: eight digits in NVML, four in sysfs
        listed = [*folder.glob(f"*{text.lower()[4:]}/msi_irqs/*")] if text else []
        yield self._interrupts(root, near, sorted(int(file.name) for file in listed))

    def _interrupts(self, root: Path, near: str, numbers: Sequence[int]) -> Finding:
        files = [root / f"proc/irq/{number}/smp_affinity_list" for number in numbers]
        found = {file: cpus for file in files if (cpus := read_text(file))}
        if not found:
            return self._finding("interrupts", "unread", "the system names none")
        far = [file for file, cpus in found.items() if not cpus_of(cpus) & cpus_of(near)]
        if not far:
            return self._finding("interrupts", "fine", "may go to CPUs of the GPU's node")
        said = f"{len(far)} of {len(found)} go only to CPUs of another node"
        change = f"echo {near} | sudo tee {' '.join(map(str, far))}"
        return self._finding("interrupts", "note", said, change)


def cpus_of(text: str) -> set[int]:
    """Return the set of CPU numbers in a string such as ``0-3,8``."""
    spans = [part.partition("-") for part in text.split(",") if part]
    return {n for a, _, b in spans for n in range(int(a), int(b or a) + 1)}


def counters(root: Path) -> Finding:
    """Return a finding about access to the GPU's hardware counters with `ncu`."""
    file = root / "proc/driver/nvidia/params"
    text = read_text(file)
    if text is None:
        return Finding("counters", "unread", f"{file} cannot be read")
    if "RmProfilingAdminOnly: 1" not in text:
        return Finding("counters", "fine", "every user may read them")
    if os.geteuid() == 0:
        return Finding("counters", "fine", "only administrators may read them, and you are one")
    return Finding("counters", "note", *nvidia_tools.COUNTERS.split("\n", 1))
