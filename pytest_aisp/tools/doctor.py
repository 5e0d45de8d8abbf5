"""`aisp machine doctor`: find what disturbs measurements on this machine, and suggest fixes."""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Collection, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

import msgspec

from ..util import device
from ..util.cli_result import CliResult, columns
from ..util.device import read_text
from ..util.device_state import THROTTLED
from ..util.gpu_lease import is_worker
from ..worker import nvidia_tools

State: TypeAlias = Literal["fine", "note", "harms", "unread"]
LABELS: dict[State, str] = {"fine": "fine", "note": "note", "harms": "HARMS", "unread": "?"}
"""The labels by state.

`note` may cost time or affect other users, `harms` makes times wrong or noisy, and `unread` could
not be read.
"""


class Finding(msgspec.Struct, frozen=True):
    """The result of one check.

    Attributes:
        text: the state that the check found.
        change: the instructions that fix it, with the command last.
    """

    name: str
    state: State
    text: str = msgspec.field(name="said")
    change: str = ""


def examine() -> list[Finding]:
    """Run all checks on this machine and return their findings."""
    from .machine_load import load_findings

    root, cores, nvml = Path("/"), device.cores_here(), device.load_nvml()
    found = [*gpu_findings(nvml, root, cores), *host_findings(root, cores)]
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


MIB, GIB = 1 << 20, 1 << 30
LIMITS = {
    "memlock": (resource.RLIMIT_MEMLOCK, 64 * MIB, "network adapters pin memory", "-l"),
    "nofile": (resource.RLIMIT_NOFILE, 4096, "ranks and loader workers open many files", "-n"),
    "stack": (resource.RLIMIT_STACK, 8 * MIB, "compilers recurse deeply", "-s"),
}
"""For each name: the limit, its lowest acceptable value, the reason, and `ulimit`'s option."""
PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton",),
    "cuda-core": ("cuda-core",),
    "NVRTC": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12"),
    "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}
"""The distributions that may contain the package, keyed by the name shown."""
SHM_FIX = "docker run --shm-size=8g ..., or sudo mount -o remount,size=8G /dev/shm"


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def host_findings(root: Path, cores: Collection[int]) -> Iterator[Finding]:
    """Yield the findings about the host."""
    yield Finding("python", "fine", platform.python_version())
    yield from _versions()
    for name, (number, least, why, option) in LIMITS.items():
        yield _limit(name, resource.getrlimit(number), least, why, option)
    yield _huge_pages(root)
    yield _governor(root, cores)
    yield _shared_memory(root / "dev" / "shm")


def _versions() -> Iterator[Finding]:
    for name, distributions in PACKAGES.items():
        version = next(filter(None, map(version_of, distributions)), None)
        if version is not None:
            yield Finding(name, "fine", version)
        elif name == "NCCL":  # torch for CPUs has no NCCL, and torch built from source contains it
            yield Finding(name, "unread", "not installed as a package")
        else:
            yield Finding(name, "note", "not installed", f"pip install {distributions[0]}")


def _limit(name: str, limits: tuple[int, int], least: int, why: str, option: str) -> Finding:
    soft, hard = limits
    text = f"ulimit: {_amount(name, soft)}"
    if soft == resource.RLIM_INFINITY or soft >= least:
        return Finding(name, "fine", text)
    change = f"raise the hard limit of {name} in limits.conf"
    if hard == resource.RLIM_INFINITY or hard >= least:
        change = f"ulimit {option} {least if name == 'nofile' else least >> 10}"
    return Finding(name, "note", f"{text}, less than {_amount(name, least)}: {why}", change)


def _amount(name: str, value: int) -> str:
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    return str(value) if name == "nofile" else f"{value / MIB:.4g} MiB"


def _huge_pages(root: Path) -> Finding:
    file = root / "sys/kernel/mm/transparent_hugepage/enabled"
    chosen = re.search(r"\[(\w+)\]", read_text(file) or "")
    if chosen is None:
        return Finding("huge pages", "unread", f"{file} names no setting")
    if chosen[1] != "never":
        return Finding("huge pages", "fine", f"transparent: {chosen[1]}")
    change = f"echo madvise | sudo tee {file}"
    return Finding("huge pages", "note", "transparent: never; large buffers miss the TLB", change)


def _governor(root: Path, cores: Collection[int]) -> Finding:
    governor = device.governor(root / "sys/devices/system/cpu", cores)
    if governor is None:
        return Finding("governor", "unread", "unknown, as in a virtual machine")
    if governor == "performance":
        return Finding("governor", "fine", "performance")
    text = f"{governor}: CPU clocks change with the load, and so do times of the host"
    return Finding("governor", "harms", text, "sudo cpupower frequency-set -g performance")


def _shared_memory(folder: Path) -> Finding:
    try:
        status = os.statvfs(folder)
    except OSError as error:
        return Finding("/dev/shm", "unread", str(error))
    size = status.f_frsize * status.f_blocks
    text = f"{size / GIB:.4g} GiB" if size >= GIB else f"{size / MIB:.4g} MiB"
    if size >= GIB:
        return Finding("/dev/shm", "fine", text)
    text = f"{text}, less than 1 GiB: ranks and loader workers share memory there"
    state: State = "harms" if size <= 64 * MIB else "note"  # the default in containers is 64 MiB
    return Finding("/dev/shm", state, text, SHM_FIX)


COMPUTE_DEFAULT, COMPUTE_EXCLUSIVE = 0, 3
"""Two of NVML's compute modes: a GPU allows many processes, or only one. Mode 2 allows none."""
SM, LOCKED = 1, 0x2
"""NVML's constants for the SM clock, and for a clock that `nvidia-smi -lgc` or `-ac` has set."""
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
        yield gpu.numa(root, cores)
    yield counters(root)


class _Gpu:
    """The checks of one GPU. Each method returns a finding."""

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
            text = "exclusive: a remeasurement's process cannot start beside the first one"
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

    def numa(self, root: Path, cores: Collection[int]) -> Finding:
        pci = self._query("nvmlDeviceGetPciInfo")
        bus = "" if pci is None else pci.busId
        text = bus.decode() if isinstance(bus, bytes) else str(bus)
        folder = root / "sys/bus/pci/devices"
        node = device.numa_node(text.strip("\0"), folder) if text else None
        near = read_text(root / f"sys/devices/system/node/node{node}/cpulist")
        if node is None or near is None:
            return self._finding("NUMA", "unread", "the system does not know the node")
        if set(cores) & cpus_of(near):
            return self._finding("NUMA", "fine", f"node {node}, CPUs {near}")
        change = f"numactl --cpunodebind={node} --membind={node} pytest ..."
        far = f"node {node}, CPUs {near}; this process may use none of them"
        return self._finding("NUMA", "harms", far, change)


def cpus_of(text: str) -> set[int]:
    """Return the set of CPU numbers in a text such as ``0-3,8``."""
    spans = [part.partition("-") for part in text.split(",") if part]
    return {n for a, _, b in spans for n in range(int(a), int(b or a) + 1)}


def counters(root: Path) -> Finding:
    """Return a finding that says whether `ncu` may read the GPU's counters."""
    file = root / "proc/driver/nvidia/params"
    text = read_text(file)
    if text is None:
        return Finding("counters", "unread", f"{file} cannot be read")
    if "RmProfilingAdminOnly: 1" not in text:
        return Finding("counters", "fine", "every user may read them")
    if os.geteuid() == 0:
        return Finding("counters", "fine", "only administrators may read them, and you are one")
    return Finding("counters", "note", *nvidia_tools.COUNTERS.split("\n", 1))
