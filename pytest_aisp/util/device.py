"""The machine: its GPUs or its CPU, and the versions of its libraries.

`Machine.here` asks NVML and never touches CUDA, so the pytest process may call it.
"""

from __future__ import annotations

import functools
import importlib
import os
import platform
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from ..page.gpu_specs import arch_of, product_of
from ..results.models import joined

T = TypeVar("T")

CPUS, PCI = Path("/sys/devices/system/cpu"), Path("/sys/bus/pci/devices")
VERSIONS = ("torch", "triton", "cudnn", "cublas", "nccl")
"""The libraries whose versions `versions` returns."""
CUBLAS_PARTS = 0, 1, 2
"""cuBLAS's MAJOR_VERSION, MINOR_VERSION and PATCH_LEVEL (library_types.h)."""


@dataclass(frozen=True)
class Machine:
    """The machine a case runs on.

    Attributes:
        arch: ``sm90``, or ``cpu`` without a GPU.
        product: the key of stored results: ``nvidia-h200``, ``cpu-<model>-<cores>``.
        name: as the driver reports it.
        gpus: UUIDs of the visible GPUs of this product.
        versions: of the driver and CUDA.
        facts: power limit, MIG, NUMA node, CPU and its governor; None for an unknown one.
    """

    arch: str
    product: str
    name: str
    gpus: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Machine:
        """Return this machine with its first visible GPU, or with its CPU if there is none."""
        return _gpu_machine() or cpu_machine()

    def with_count(self, count: int) -> str:
        """Return the product slug for `count` GPUs: ``nvidia-h200-x2``."""
        return joined(self.product, count)

    def to_json(self) -> dict[str, object]:
        """Return plain types."""
        return asdict(self) | {"gpus": list(self.gpus)}


def cpu_machine() -> Machine:
    """Return this machine as a CPU machine; model and usable cores form its product."""
    cores = len(cores_here())
    name = cpu_name()
    product = f"cpu-{product_of(name)}-{cores}c"
    return Machine("cpu", product, f"{name}, {cores} cores", facts=_cpu_facts())


@functools.cache
def _cpu_facts() -> Mapping[str, object]:
    return {"cpu": cpu_name(), "governor": governor()}


def cpu_name() -> str:
    """Return the CPU's model."""
    lines = (read_text(Path("/proc/cpuinfo")) or "").splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cores_here() -> Collection[int]:
    """Return the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def governor(folder: Path = CPUS, cores: Collection[int] | None = None) -> str | None:
    """Return the frequency governors of `cores` (by default the usable ones), or None in a VM."""
    cores = cores_here() if cores is None else cores
    files = [folder / f"cpu{core}" / "cpufreq" / "scaling_governor" for core in cores]
    return ", ".join(sorted({word for file in files if (word := read_text(file))})) or None


def numa_node(bus: str, folder: Path = PCI) -> int | None:
    """Return the NUMA node of the PCI device at NVML's `bus` (``00000000:0F:00.0``), or None."""
    domain, _, rest = bus.lower().partition(":")
    node = read_text(folder / f"{domain[-4:]}:{rest}" / "numa_node")
    return None if node is None or int(node) < 0 else int(node)  # -1: the system does not know


def read_text(file: Path) -> str | None:
    """Return the stripped text of a file, or None if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return None


def _gpu_machine() -> Machine | None:
    nvml = load_nvml()
    handles = visible_gpus(nvml)
    if nvml is None or not handles:
        return None
    name = str(nvml.nvmlDeviceGetName(handles[0]))
    arch = arch_of(*nvml.nvmlDeviceGetCudaComputeCapability(handles[0]))
    same = [h for h in handles if str(nvml.nvmlDeviceGetName(h)) == name]
    cuda = int(nvml.nvmlSystemGetCudaDriverVersion())
    versions = {
        "driver": str(nvml.nvmlSystemGetDriverVersion()),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
    }
    uuids = tuple(str(nvml.nvmlDeviceGetUUID(h)) for h in same)
    facts = {**_gpu_facts(nvml, handles[0]), **_cpu_facts()}
    return Machine(arch, product_of(name), name, uuids, versions, facts)


def clocks() -> dict[str, int | None]:
    """Return the first visible GPU's SM and memory clocks in MHz and their maxima, or nothing."""
    nvml = load_nvml()
    handles = visible_gpus(nvml)
    if nvml is None or not handles:
        return {}
    domains = {"sm": nvml.NVML_CLOCK_SM, "memory": nvml.NVML_CLOCK_MEM}
    found = {}
    for name, domain in domains.items():
        found[f"{name}_mhz"] = query(nvml.nvmlDeviceGetClockInfo, handles[0], domain)
    for name, domain in domains.items():
        found[f"{name}_max_mhz"] = query(nvml.nvmlDeviceGetMaxClockInfo, handles[0], domain)
    return found


def _gpu_facts(nvml: ModuleType, handle: object) -> Mapping[str, object]:
    limit = query(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    mode = query(nvml.nvmlDeviceGetMigMode, handle)  # MIG mode now, and after the next reset
    pci = query(nvml.nvmlDeviceGetPciInfo, handle)
    return {
        "power_limit_w": None if limit is None else limit // 1000,
        "mig": None if mode is None else bool(mode[0]),
        "numa_node": None if pci is None else numa_node(str(pci.busId)),
    }


@functools.cache
def load_nvml() -> ModuleType | None:
    """Return pynvml, initialized; None if this process may use no GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, no permission
        return None
    module: ModuleType = pynvml
    return module


def gpu_handles(nvml: ModuleType) -> list[object]:
    """Return NVML's handle of each GPU of this machine."""
    return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]


def visible_gpus(nvml: ModuleType | None) -> list[object]:
    """Return NVML's handle of each GPU that this process may use."""
    return [h for h in gpu_handles(nvml) if is_visible(nvml, h)] if nvml else []


def is_visible(nvml: ModuleType, handle: object) -> bool:
    """Return whether ``CUDA_VISIBLE_DEVICES`` names the GPU by index or start of its UUID."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return True
    index, uuid = str(nvml.nvmlDeviceGetIndex(handle)), str(nvml.nvmlDeviceGetUUID(handle))
    named = [name.strip() for name in visible.split(",")]
    return index in named or uuid.startswith(tuple(n for n in named if n.startswith("GPU-")))


def query(function: Callable[..., T], *args: object) -> T | None:
    """Return the answer of a library function, or None if it fails here."""
    try:
        return function(*args)
    except Exception:  # NVML has an exception class for each refusal
        return None


def versions() -> dict[str, str | None]:
    """Return the version of each library, None for a missing one.

    No library is loaded and no GPU is used.
    """
    import torch

    cudnn = query(torch.backends.cudnn.version)
    nccl = query(torch.cuda.nccl.version)
    return {
        "torch": str(torch.__version__),
        "triton": version_of("triton"),
        "cudnn": None if cudnn is None else str(cudnn),
        "cublas": _cublas_version(torch.version.cuda),
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
    }


def version_of(package: str) -> str | None:
    """Return the version of a Python package, or None without it."""
    try:
        return str(importlib.import_module(package).__version__)
    except ImportError:
        return None


def _cublas_version(cuda: str | None) -> str | None:
    """Return the version of the cuBLAS that torch has loaded, according to the library itself."""
    import ctypes

    if cuda is None:
        return None
    value, parts = ctypes.c_int(), []
    try:
        library = ctypes.CDLL(f"libcublas.so.{cuda.partition('.')[0]}", os.RTLD_NOLOAD)
        for part in CUBLAS_PARTS:
            if library.cublasGetProperty(part, ctypes.byref(value)):
                return None
            parts.append(str(value.value))
    except (OSError, AttributeError):  # not loaded, or not cuBLAS
        return None
    return ".".join(parts)
