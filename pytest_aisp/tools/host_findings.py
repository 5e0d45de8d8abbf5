"""The findings of `aisp machine doctor` about the host, this process and other processes.

Chapter 3 of the suites has pages that measure the effects of process settings, such as the number
of threads.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import time
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Literal, TypeAlias

import msgspec

from ..timing import neighbors
from ..timing.neighbors import NAMED, Neighbors
from ..util import device
from ..util.cpu_load import STOLEN, CpuReading, load_text, read_cpu
from ..util.device import read_text

State: TypeAlias = Literal["fine", "note", "harms", "unread"]
"""The result of a check. A `note` may cost time or affect other users, `harms` means wrong or noisy
times, and `unread` means that the check could not read a value.
"""
MIB, GIB = 1 << 20, 1 << 30
LIMITS = {
    "memlock": (resource.RLIMIT_MEMLOCK, 64 * MIB, "network adapters pin memory", "-l"),
    "nofile": (resource.RLIMIT_NOFILE, 4096, "ranks and loader workers open many files", "-n"),
    "stack": (resource.RLIMIT_STACK, 8 * MIB, "compilers recurse deeply", "-s"),
}
"""Each limit's number, lowest acceptable value, reason, and option of `ulimit`."""
PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton",),
    "cuda-core": ("cuda-core",),
    "NVRTC": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12"),
    "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}
"""The Python distributions that may contain the package, for each name in the report."""
SHM_FIX = (
    "in a container, docker run --shm-size=8g; elsewhere: sudo mount -o remount,size=8G /dev/shm"
)
SECONDS, READINGS = 1.0, 5
"""Length of the load measurement in seconds, and number of NVML readings in that time."""
CHAINS = 50
"""Number of kernel chains, 5 ms each, that detect time slices of other processes."""
CROWDED = 0.5
"""Other processes harm measurements if they use at least this share of the cores."""
WAIT = "find and end it, or use another GPU: nvidia-smi"


class Finding(msgspec.Struct, frozen=True):
    """The result of one check.

    Attributes:
        text: the result of the check in words.
        change: the instructions that fix a problem, with the command last.
    """

    name: str
    state: State
    text: str = msgspec.field(name="said")
    change: str = ""


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
        elif name == "NCCL":  # a CPU build of torch lacks NCCL, and a build from source includes it
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


BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
"""Variables with which torch's OpenMP binds the threads of a team, and the process's first thread.
Later threads and processes inherit the CPUs of the thread that starts them."""
ONE_CORE = re.compile(r"((threads|cores)(\(\d+\))?)?", re.IGNORECASE)
"""Values of ``OMP_PLACES`` with which each place is one core."""
ALLOCATORS = re.compile(r"jemalloc|tcmalloc|mimalloc")
"""Names in ``LD_PRELOAD`` of libraries that replace the allocator of glibc."""


def process_findings(
    root: Path, cores: Collection[int], environment: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield the findings about the settings of this process."""
    yield _cpu_quota(root, cores)
    yield _numa_balancing(root)
    yield _threads(cores, environment)
    yield _binding(cores, environment)
    yield _malloc(environment)
    yield _module_loading(environment)
    yield _connections(environment)
    yield _segments(environment)


def _cpu_quota(root: Path, cores: Collection[int]) -> Finding:
    text = read_text(root / "sys/fs/cgroup/cpu.max")
    if text is None:
        return Finding("CPU quota", "unread", "the system names no cgroup of version 2")
    quota, _, period = text.strip().partition(" ")
    if quota == "max":
        return Finding("CPU quota", "fine", f"none, {len(cores)} cores")
    share = int(quota) / int(period or 100_000)
    said = f"{share:g} of {len(cores)} cores"
    if share >= len(cores):
        return Finding("CPU quota", "fine", said)
    said += ": the system stops this process whenever it has used its share"
    change = "use whole cores instead of a share: docker run --cpuset-cpus=0-7 ..."
    return Finding("CPU quota", "harms", said, change)


def _numa_balancing(root: Path) -> Finding:
    file = root / "proc/sys/kernel/numa_balancing"
    text = read_text(file)
    if text is None:
        return Finding("NUMA balancing", "fine", "this kernel has none")
    if text.strip() == "0":
        return Finding("NUMA balancing", "fine", "off")
    said = "on: the kernel moves pages while they are used"
    return Finding("NUMA balancing", "note", said, "sudo sysctl -w kernel.numa_balancing=0")


def _threads(cores: Collection[int], environment: Mapping[str, str]) -> Finding:
    value = environment.get("OMP_NUM_THREADS", "")
    if not value:
        return Finding("OpenMP threads", "fine", "not set: one per physical core")
    count = int(value) if value.isdecimal() else 0
    if count == 0:
        said = f"OMP_NUM_THREADS={value} is not a number"
    elif count > len(cores):
        said = f"{count} threads on {len(cores)} cores: they wait for each other"
    elif count < len(cores) / 2:
        said = f"{count} of {len(cores)} cores: operators on the CPU use no others"
    else:
        return Finding("OpenMP threads", "fine", f"{count} on {len(cores)} cores")
    return Finding("OpenMP threads", "note", said, f"export OMP_NUM_THREADS={len(cores)}")


def _binding(cores: Collection[int], environment: Mapping[str, str]) -> Finding:
    names = [name for name in BINDING if environment.get(name)]
    if len(cores) > 1 and names and environment.get("OMP_PROC_BIND", "").lower() != "false":
        said = ", ".join(f"{name}={environment[name]}" for name in names)
        said += ": after pytest imports torch, all processes that it starts use only"
        change = f"unset {' '.join(names)}"
        if ONE_CORE.fullmatch(environment.get("OMP_PLACES", "")):
            return Finding("thread binding", "harms", f"{said} one core", change)
        return Finding("thread binding", "note", f"{said} the first of these places", change)
    if len(cores) == 1 and (count := os.cpu_count() or 1) > 1:
        said = f"1 of {count} cores: pytest, its worker processes and the GPU's driver share it"
        change = "allow several cores: taskset -c 0-7 ..., or docker run --cpuset-cpus=0-7 ..."
        return Finding("thread binding", "harms", said, change)
    return Finding("thread binding", "fine", "none")


def _malloc(environment: Mapping[str, str]) -> Finding:
    found = ALLOCATORS.search(environment.get("LD_PRELOAD", ""))
    if found is None and (arenas := environment.get("MALLOC_ARENA_MAX")):
        return Finding("malloc", "fine", f"glibc with at most {arenas} arenas")
    return Finding("malloc", "fine", found[0] if found else "glibc")


def _module_loading(environment: Mapping[str, str]) -> Finding:
    if environment.get("CUDA_MODULE_LOADING", "LAZY").upper() != "EAGER":
        return Finding("module loading", "fine", "lazy")
    said = "eager: each process loads all kernels of all libraries when it starts"
    return Finding("module loading", "note", said, "unset CUDA_MODULE_LOADING")


def _connections(environment: Mapping[str, str]) -> Finding:
    value = environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if value != "1":
        return Finding("connections", "fine", value or "the driver's default")
    said = "1 queue to the GPU: kernels of different streams may wait for each other"
    change = "unless a framework needs this: unset CUDA_DEVICE_MAX_CONNECTIONS"
    return Finding("connections", "note", said, change)


def _segments(environment: Mapping[str, str]) -> Finding:
    old, new = (environment.get(n, "") for n in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    return Finding("GPU allocator", "fine", new or old or "torch's default")


def load_findings(nvml: ModuleType | None, cores: Collection[int]) -> Iterator[Finding]:
    """Yield findings about other processes that use the cores and the visible GPUs."""
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
    """Yield findings about CPU time of other processes, and CPU time that the hypervisor takes."""
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
        change = "use a virtual machine with dedicated cores"
        yield Finding("steal", "harms", f"the host takes {stolen:.0%} of the CPU time", change)
    else:
        yield Finding("steal", "fine", f"the host takes {stolen:.0%} of the CPU time")


def utilization(name: str, percents: list[int]) -> Finding:
    """Return a finding about the GPU's utilization by other processes."""
    if not percents:
        return Finding(name, "unread", "NVML gives no answer")
    most = max(percents)
    if most < 100 * NAMED:
        return Finding(name, "fine", f"{most} % in {SECONDS:g} s")
    return Finding(name, "harms", f"another process uses {most} % of this GPU", WAIT)


def time_slices(name: str, index: int) -> Finding:
    """Return a finding about the time slices of other processes on torch's GPU `index`."""
    import torch

    neighbors.slice_reader.cache_clear()  # the cached reader belongs to one GPU
    if not torch.cuda.is_available():
        return Finding(name, "unread", "torch cannot use this GPU")
    with torch.cuda.device(index):
        read = device.query(neighbors.slice_reader)
        if read is None:
            return Finding(name, "unread", "this machine cannot compile CUDA C++")
        found = Neighbors(read)
        found.look(CHAINS)
    if not found.seen.total:
        return Finding(name, "unread", "the CPU is too busy to queue kernels without a pause")
    if found.share() < NAMED:
        return Finding(name, "fine", f"none in {found.seen.total * 1e3:.0f} ms")
    return Finding(name, "harms", found.text(), WAIT)
