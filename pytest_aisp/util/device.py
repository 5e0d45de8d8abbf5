"""Which machine this is: arch, product, clocks, power, throttling.

`Machine.here` asks NVML and never touches CUDA, so the pytest process may call it.
"""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..page.gpu_specs import arch_of, product_of
from ..results.models import joined

# NVML clock event reasons that make a measurement worthless: hardware slowdown, hardware thermal,
# power brake, software thermal. The software power cap (0x4) is normal at full load.
THROTTLED = {0x8: "hardware slowdown", 0x20: "software thermal slowdown"}
THROTTLED |= {0x40: "hardware thermal slowdown", 0x80: "power brake"}
LEASES = "AISP_LEASES"
"""The variable that names the folder of leases."""
CPUS, PCI = Path("/sys/devices/system/cpu"), Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Machine:
    """The machine a case runs on.

    Attributes:
        arch: ``sm90``, or ``cpu`` without a GPU.
        product: what stored results belong to: ``nvidia-h200``, ``cpu-<model>-<cores>``.
        name: as the driver says it.
        gpus: UUIDs of the visible GPUs of this product.
        versions: driver, CUDA, and (once the worker process has told) torch and triton.
        facts: power limit, MIG, NUMA node, CPU and its governor; None for what nobody says.
    """

    arch: str
    product: str
    name: str
    gpus: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Machine:
        """Return this machine, by its first visible GPU, or by its CPU without one."""
        return _gpu_machine() or cpu_machine()

    def with_count(self, count: int) -> str:
        """Return the product slug for `count` GPUs: ``nvidia-h200-x2``."""
        return joined(self.product, count)

    def to_json(self) -> dict[str, Any]:
        """Return plain types."""
        return asdict(self) | {"gpus": list(self.gpus)}


def cpu_machine() -> Machine:
    """Return the machine by its CPU: model and usable cores are its product."""
    cores = len(cores_here())
    name = _cpu_name()
    product = f"cpu-{product_of(name)}-{cores}c"
    return Machine("cpu", product, f"{name}, {cores} cores", facts=_cpu_facts())


@functools.cache
def _cpu_facts() -> Mapping[str, Any]:
    return {"cpu": _cpu_name(), "governor": governor()}


def cores_here() -> Collection[int]:
    """Return the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def governor(folder: Path = CPUS, cores: Collection[int] | None = None) -> str | None:
    """Return the frequency governors of `cores` (those usable here), or None in a VM."""
    cores = cores_here() if cores is None else cores
    files = [folder / f"cpu{core}" / "cpufreq" / "scaling_governor" for core in cores]
    return ", ".join(sorted({word for file in files if (word := said(file))})) or None


def numa_node(bus: str, folder: Path = PCI) -> int | None:
    """Return the NUMA node of the PCI device at NVML's `bus` (``00000000:0F:00.0``), or None."""
    domain, _, rest = bus.lower().partition(":")
    node = said(folder / f"{domain[-4:]}:{rest}" / "numa_node")
    return None if node is None or int(node) < 0 else int(node)  # -1: the system does not know


def said(file: Path) -> str | None:
    """Return what a file says, or None."""
    try:
        return file.read_text().strip()
    except OSError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [ln.split(":", 1)[1].strip() for ln in lines if ln.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _gpu_machine() -> Machine | None:
    nvml = _nvml()
    if nvml is None:
        return None
    handles = [h for h in _handles(nvml) if _visible(nvml, h)]
    if not handles:
        return None
    name = str(nvml.nvmlDeviceGetName(handles[0]))
    arch = arch_of(*nvml.nvmlDeviceGetCudaComputeCapability(handles[0]))
    alike = [h for h in handles if str(nvml.nvmlDeviceGetName(h)) == name]
    cuda = int(nvml.nvmlSystemGetCudaDriverVersion())
    versions = {
        "driver": str(nvml.nvmlSystemGetDriverVersion()),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
    }
    uuids = tuple(str(nvml.nvmlDeviceGetUUID(h)) for h in alike)
    facts = {**_gpu_facts(nvml, handles[0]), **_cpu_facts()}
    return Machine(arch, product_of(name), name, uuids, versions, facts)


def clocks() -> dict[str, int | None]:
    """Return the MHz of SM and memory of the first visible GPU, and their maxima; or nothing."""
    nvml = _nvml()
    handle = next((h for h in _handles(nvml) if _visible(nvml, h)), None) if nvml else None
    if nvml is None or handle is None:
        return {}
    domains = {"sm": nvml.NVML_CLOCK_SM, "memory": nvml.NVML_CLOCK_MEM}
    now = {f"{d}_mhz": _asked(nvml.nvmlDeviceGetClockInfo, handle, c) for d, c in domains.items()}
    most = {
        f"{d}_max_mhz": _asked(nvml.nvmlDeviceGetMaxClockInfo, handle, c)
        for d, c in domains.items()
    }
    return {**now, **most}


def _gpu_facts(nvml: Any, handle: Any) -> Mapping[str, Any]:
    limit = _asked(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    mode = _asked(nvml.nvmlDeviceGetMigMode, handle)  # now, and after the next reset
    pci = _asked(nvml.nvmlDeviceGetPciInfo, handle)
    return {
        "power_limit_w": None if limit is None else limit // 1000,
        "mig": None if mode is None else bool(mode[0]),
        "numa_node": None if pci is None else numa_node(str(pci.busId)),
    }


@functools.cache
def _nvml() -> Any | None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, no permission: each means no GPU for us
        return None
    return pynvml


def _handles(nvml: Any) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]


def _visible(nvml: Any, handle: Any) -> bool:
    """Return whether ``CUDA_VISIBLE_DEVICES`` names the GPU: its index, or a UUID's beginning."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return True
    index, uuid = str(nvml.nvmlDeviceGetIndex(handle)), str(nvml.nvmlDeviceGetUUID(handle))
    named = [name.strip() for name in visible.split(",")]
    return index in named or uuid.startswith(tuple(n for n in named if n.startswith("GPU-")))


def _asked(question: Any, *args: Any) -> Any:
    """Return NVML's answer, or None where this GPU or container does not give it."""
    try:
        return question(*args)
    except Exception:  # NVML raises a class of its own per refusal
        return None


def _is_worker(pid: int) -> bool:
    """Return whether `pid` is a worker process with leases where ours are: they take turns."""
    try:
        command, variables = (Path(f"/proc/{pid}/{f}").read_bytes() for f in ("cmdline", "environ"))
    except OSError:  # it has ended, or is not ours to see
        return False
    if b"pytest_aisp.worker" not in command and b"pytest_aisp.distributed.rank" not in command:
        return False
    mine, prefix = os.fsencode(os.environ.get(LEASES, "")), os.fsencode(f"{LEASES}=")
    theirs = [v.removeprefix(prefix) for v in variables.split(b"\0") if v.startswith(prefix)]
    return mine in (theirs or [b""])


class Telemetry:
    """Clocks, power, temperature and throttling of one GPU while it is measured.

    NVML can cost a millisecond a call, so it is asked at every `EVERY`-th block only, and at each
    while the GPU is throttled.
    """

    EVERY = 5

    def __init__(self, index: int) -> None:
        import torch

        self._nvml = _nvml()
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        self._handle = self._nvml and _asked(self._nvml.nvmlDeviceGetHandleByUUID, uuid)
        self._blocks, self._bad = 0, False
        self._began = time.time_ns() // 1000
        self._named: bool | None = None
        self._seen: list[dict[str, Any]] = [self._read()]
        self._when = [0]

    def _read(self) -> dict[str, Any]:
        nvml, handle = self._nvml, self._handle
        if nvml is None or handle is None:
            return {}
        return {
            "sm_mhz": _asked(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            "watts": (_asked(nvml.nvmlDeviceGetPowerUsage, handle) or 0) // 1000 or None,
            "celsius": _asked(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            "reasons": _asked(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle),
        }

    def energy(self) -> float | None:
        """Return the joules that the GPU has taken since its driver was loaded, or None."""
        nvml, handle = self._nvml, self._handle
        if nvml is None or handle is None:
            return None
        millijoules = _asked(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        return None if millijoules is None else millijoules * 1e-3

    def disturbance(self) -> str | None:
        """Return why the GPU is slower than it should be, or None; looks at some blocks only."""
        self._blocks += 1
        return self.look() if self._bad or self._blocks % self.EVERY == 0 else None

    def look(self) -> str | None:
        """Return why the GPU is slower now than it should be, or None."""
        self._seen.append(self._read())
        self._when.append(self._blocks)
        reasons = self._seen[-1].get("reasons") or 0
        names = [name for bit, name in THROTTLED.items() if reasons & bit]
        names += [f"process {pid} computes on this GPU too" for pid in self._strangers()]
        self._bad = bool(names)
        return ", ".join(names) or None

    def _strangers(self) -> list[int]:
        """Return the processes that have computed here since the last question and are not ours.

        Where a container hides process ids, ours is not among those that NVML knows: then nobody
        can be told from ourselves, and nobody is accused.
        """
        nvml, handle, since = self._nvml, self._handle, self._began
        self._began = time.time_ns() // 1000
        if nvml is None or handle is None:
            return []
        if self._named is None:
            known = _asked(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
            self._named = os.getpid() in {process.pid for process in known}
        if not self._named:
            return []
        samples = _asked(nvml.nvmlDeviceGetProcessUtilization, handle, since) or []
        busy = {int(s.pid) for s in samples if s.smUtil > 0 and s.timeStamp > since}
        return sorted(pid for pid in busy if not _is_worker(pid))

    def summary(self) -> dict[str, Any]:
        """Return the range of what was seen."""
        out: dict[str, Any] = {}
        for key in ("sm_mhz", "watts", "celsius"):
            values = [s[key] for s in self._seen if s.get(key) is not None]
            out[key] = [min(values), max(values)] if values else None
        return out

    def looks(self) -> list[list[Any]]:
        """Return each look at the GPU: after how many blocks, its MHz, watts, degrees Celsius."""
        looks = zip(self._when, self._seen, strict=True)
        return [[n, *map(s.get, ("sm_mhz", "watts", "celsius"))] for n, s in looks if s]
