"""`aisp machine doctor`: find what disturbs measurements on this machine, and how to fix it."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ..util import device
from ..util.cli_result import CliResult, columns
from ..util.device import cores_here, governor, query, read_text
from ..util.device_state import THROTTLED
from ..worker import nvidia_tools


def look(root: Path = Path("/")) -> list[Finding]:
    """Return everything that there is to say of this machine."""

    cores = device.cores_here()
    return [
        *gpu_findings(device.load_nvml(), root, cores),
        *host_findings(root, cores=cores),
    ]


def doctor_result(findings: Sequence[Finding], *, as_json: bool) -> CliResult:
    """Return the findings; exit code 1 where something harms what is measured."""
    states = [finding.state for finding in findings]
    code = 1 if "harms" in states else 0
    if as_json:
        return CliResult([json.dumps([asdict(finding) for finding in findings], indent=1)], code)
    harms, unread = states.count("harms"), states.count("unread")
    closing = f"{harms} of {len(findings)} harm what is measured" if harms else "nothing harms"
    closing += f"; {unread} could not be read" if unread else ""
    return CliResult([*words(findings), closing], code)


WORDS = {
    "fine": "fine",
    "note": "note",
    "harms": "HARMS",
    "unread": "?",
}
"""`note` may cost something, or somebody; `harms` makes measurements wrong or spread; `unread` is
what this machine does not say."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        state: of `WORDS`.
        said: what it is; change: what to do where it is not fine, the command last.
    """

    name: str
    state: str
    said: str
    change: str = ""


def unread(name: str, why: str) -> Finding:
    """Return the finding of what could not be read."""
    return Finding(name, "unread", why)


def words(findings: Sequence[Finding]) -> list[str]:
    """Return a line a finding; what to change stands below it."""
    lines = columns([(WORDS[f.state], f.name, f.said) for f in findings])
    out = []
    for line, finding in zip(lines, findings, strict=True):
        out += [line, *(f"         {change}" for change in finding.change.splitlines())]
    return out


MIB, GIB = 1 << 20, 1 << 30
LIMITS = {
    "memlock": (resource.RLIMIT_MEMLOCK, 64 * MIB, "adapters between nodes pin memory"),
    "nofile": (resource.RLIMIT_NOFILE, 4096, "ranks and loader workers hold files and pipes"),
    "stack": (resource.RLIMIT_STACK, 8 * MIB, "compilers recurse deeply"),
}
"""By name: the limit, the least that is well, and what needs it."""
UNLIMITED = resource.RLIM_INFINITY
PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton",),
    "cuda-core": ("cuda-core",),
    "NVRTC": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12"),
    "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}
"""By name: the distributions that bring it."""


def host_findings(
    root: Path = Path("/"),
    *,
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit,
    installed: Callable[[str], str | None] | None = None,
    cores: Collection[int] | None = None,
) -> Iterator[Finding]:
    """Yield what there is to say of the host.

    Args:
        root: where ``proc``, ``sys`` and ``dev`` lie.
        limit: soft and hard limit of this process; installed: the version of a distribution.
        cores: CPUs that this process may use.
    """
    yield Finding("python", "fine", platform.python_version())
    yield from _versions(installed or version_of)
    for name, (number, least, why) in LIMITS.items():
        yield _limit(name, limit(number), least, why)
    yield _huge_pages(root)
    yield _governor(root, cores_here() if cores is None else cores)
    yield _shared_memory(root / "dev" / "shm")


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _versions(installed: Callable[[str], str | None]) -> Iterator[Finding]:
    for name, distributions in PACKAGES.items():
        found = next((v for d in distributions if (v := installed(d)) is not None), None)
        if found is not None:
            yield Finding(name, "fine", found)
        elif name == "NCCL":  # a torch built by oneself, or for CPUs, has it inside or not at all
            yield unread(name, "not installed as a package")
        else:
            yield Finding(name, "note", "not installed", f"pip install {distributions[0]}")


def _limit(name: str, found: tuple[int, int], least: int, why: str) -> Finding:
    soft, hard = found
    said = f"ulimit: {_amount(name, soft)}"
    if soft == UNLIMITED or soft >= least:
        return Finding(name, "fine", said)
    option = {"memlock": "-l", "nofile": "-n", "stack": "-s"}[name]
    number = least if name == "nofile" else least >> 10
    able = hard == UNLIMITED or hard >= least
    change = f"ulimit {option} {number}" if able else f"raise the hard limit in limits.conf: {name}"
    return Finding(name, "note", f"{said}, less than {_amount(name, least)}: {why}", change)


def _amount(name: str, value: int) -> str:
    if value == UNLIMITED:
        return "unlimited"
    return str(value) if name == "nofile" else f"{value / MIB:.4g} MiB"


def _huge_pages(root: Path) -> Finding:
    file = root / "sys/kernel/mm/transparent_hugepage/enabled"
    chosen = re.search(r"\[(\w+)\]", read_text(file) or "")
    if chosen is None:
        return unread("huge pages", f"{file} does not say")
    if chosen[1] != "never":
        return Finding("huge pages", "fine", f"transparent: {chosen[1]}")
    change = f"echo madvise | sudo tee {file}"
    return Finding("huge pages", "note", "transparent: never; large buffers miss the TLB", change)


def _governor(root: Path, cores: Collection[int]) -> Finding:
    found = governor(root / "sys/devices/system/cpu", cores)
    if found is None:
        return unread("governor", "the CPUs do not say: a virtual machine")
    if found == "performance":
        return Finding("governor", "fine", "performance")
    text = f"{found}: clocks follow the load, and host-clock times with them"
    return Finding("governor", "harms", text, "sudo cpupower frequency-set -g performance")


def _shared_memory(folder: Path) -> Finding:
    try:
        size = os.statvfs(folder).f_frsize * os.statvfs(folder).f_blocks
    except OSError as error:
        return unread("/dev/shm", str(error))
    return shared_memory(size)


def shared_memory(size: int) -> Finding:
    """Return the finding of a /dev/shm of `size` bytes: a container's default is 64 MiB."""
    text = f"{size / GIB:.4g} GiB" if size >= GIB else f"{size / MIB:.4g} MiB"
    if size >= GIB:
        return Finding("/dev/shm", "fine", text)
    why = f"{text}, less than 1 GiB: ranks and loader workers share memory there"
    return Finding("/dev/shm", "harms" if size <= 64 * MIB else "note", why, CONTAINER)


CONTAINER = "docker run --shm-size=8g ..., or sudo mount -o remount,size=8G /dev/shm"


SHARED, ALONE = 0, 3
"""NVML's compute modes: any number of processes on a GPU, one alone; 2 is none at all."""
SM, LOCKED = 1, 0x2
"""NVML's clock of the processors, and the reason that a clock was set (-lgc, -ac)."""
NO_GPU = "NVML finds no GPU, or its driver is not loaded: nothing is known of GPUs"


def gpu_findings(nvml: Any | None, root: Path, cores: Collection[int]) -> Iterator[Finding]:
    """Yield what there is to say of the visible GPUs.

    Args:
        nvml: pynvml, initialised, or None where there is none.
        root: where ``proc`` and ``sys`` lie.
        cores: CPUs that this process may use.
    """
    handles = (
        [] if nvml is None else [h for h in device.gpu_handles(nvml) if device.is_visible(nvml, h)]
    )
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
        return None if asked is None else query(asked, self._handle, *more)

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
        pids = [p.pid for p in found if p.pid != os.getpid() and not device.is_worker(p.pid)]
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
        near = read_text(root / f"sys/devices/system/node/node{node}/cpulist")
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
    text = read_text(root / "proc/driver/nvidia/params")
    if text is None:
        return unread("counters", f"{root / 'proc/driver/nvidia/params'} cannot be read")
    if "RmProfilingAdminOnly: 1" not in text:
        return Finding("counters", "fine", "every user may read them")
    if os.geteuid() == 0 if admin is None else admin:
        return Finding("counters", "fine", "for administrators only, as this one is")
    return Finding("counters", "note", *nvidia_tools.COUNTERS.split("\n", 1))
