"""`aisp doctor`: what of this machine is well for measuring, what is not, and what to change."""

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

from ..util import device
from ..util.cli_result import CliResult, columns
from ..util.device import cores_here, governor, said


def look(root: Path = Path("/")) -> list[Finding]:
    """Return everything that there is to say of this machine."""
    from . import gpu_health

    cores = device.cores_here()
    return [
        *gpu_health.findings(device._nvml(), root, cores),
        *findings(root, cores=cores),
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


def findings(
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
    chosen = re.search(r"\[(\w+)\]", said(file) or "")
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
