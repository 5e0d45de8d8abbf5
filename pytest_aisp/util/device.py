"""The machine: its GPUs or its CPU, and the versions of its libraries.

`Machine.here` uses NVML and never CUDA, so the pytest process may call it.
"""

from __future__ import annotations

import functools
import hashlib
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
        arch: the GPU's arch, such as ``sm90``, or ``cpu`` without a GPU.
        product: the key of stored results, ``nvidia-h200`` or ``cpu-<model>-<cores>``.
        name: the name that the driver reports.
        gpus: the UUIDs of the visible GPUs of this product.
        versions: the versions of the driver and of CUDA.
        facts: power limit, MIG, NUMA node, CPU and its governor. Unknown values are None.
    """

    arch: str
    product: str
    name: str
    gpus: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Machine:
        """Return this machine with its first visible GPU, or with its CPU if no GPU is visible."""
        return _gpu_machine() or cpu_machine()

    def with_count(self, count: int, nodes: int = 1) -> str:
        """Return the product slug for `count` GPUs in `nodes` machines: ``nvidia-h200-x2``."""
        return joined(self.product, count, nodes)

    def to_json(self) -> dict[str, object]:
        """Return plain types."""
        return asdict(self) | {"gpus": list(self.gpus)}


def cpu_machine() -> Machine:
    """Return this machine as a CPU machine, whose product is the CPU's model and usable cores."""
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
    """Return the frequency governors of `cores`, or None if they are unknown, as in a VM.

    By default, these are the cores that this process may use.
    """
    cores = cores_here() if cores is None else cores
    files = [folder / f"cpu{core}" / "cpufreq" / "scaling_governor" for core in cores]
    return ", ".join(sorted({word for file in files if (word := read_text(file))})) or None


def numa_node(bus: str, folder: Path = PCI) -> int | None:
    """Return a PCI device's NUMA node, or None. `bus` is NVML's, as in ``00000000:0F:00.0``."""
    domain, _, rest = bus.lower().partition(":")
    node = read_text(folder / f"{domain[-4:]}:{rest}" / "numa_node")
    return None if node is None or int(node) < 0 else int(node)  # -1 means unknown


def read_text(file: Path) -> str | None:
    """Return a file's text without surrounding white space, or None if it cannot be read."""
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
    """Return the first visible GPU's SM and memory clocks in MHz and their maxima.

    Without a GPU, the mapping is empty.
    """
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
    uuid = query(nvml.nvmlDeviceGetUUID, handle)
    return {
        "board": None if uuid is None else hashlib.sha256(str(uuid).encode()).hexdigest()[:12],
        "power_limit_w": None if limit is None else limit // 1000,
        "mig": None if mode is None else bool(mode[0]),
        "numa_node": None if pci is None else numa_node(str(pci.busId)),
    }


@functools.cache
def load_nvml() -> ModuleType | None:
    """Return pynvml after its initialization, or None if this process may not use a GPU."""
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
    """Return whether ``CUDA_VISIBLE_DEVICES`` has the GPU's index or the beginning of its UUID."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return True
    index, uuid = str(nvml.nvmlDeviceGetIndex(handle)), str(nvml.nvmlDeviceGetUUID(handle))
    named = [name.strip() for name in visible.split(",")]
    return index in named or uuid.startswith(tuple(n for n in named if n.startswith("GPU-")))


def query(function: Callable[..., T], *args: object) -> T | None:
    """Call a library function. Return its result, or None if it fails on this machine."""
    try:
        return function(*args)
    except Exception:  # NVML has one exception class per error code
        return None


def versions() -> dict[str, str | None]:
    """Return the version of each library, or None if a library is missing.

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


def libraries_and_gpu(device: str) -> dict[str, str | None]:
    """Return `versions`, and on a GPU also CUDA's version and the GPU's name."""
    import torch

    if not device.startswith("cuda"):
        return versions()
    return {
        **versions(),
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(),
    }


def version_of(package: str) -> str | None:
    """Return the version of a Python package, or None if it is not installed."""
    try:
        return str(importlib.import_module(package).__version__)
    except ImportError:
        return None


def _cublas_version(cuda: str | None) -> str | None:
    """Return the version that the cuBLAS library loaded by torch reports."""
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
