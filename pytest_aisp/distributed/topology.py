"""The GPUs of this machine and the ways between them, as NVML and the kernel say it.

Nothing here touches CUDA. What a driver or a container does not say is unknown, and said to be.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..util import device
from ..util.cli_result import CliError, CliResult, columns
from ..util.device import _asked

PCI = Path("/sys/bus/pci/devices")
SWITCH = "NVSwitch"
MOST_LINKS = 36
"""Links that NVML can be asked about (NVML_NVLINK_MAX_LINKS of NVLink 6)."""
# NVML numbers NVLink's versions in an enumeration of its own (nvmlNvlinkVersion_t; an A100 says 5),
# and the bytes/s that a link of each carries in one direction, from NVIDIA's data sheets: an H200
# has 18 links of NVLink 4 and 900 GB/s both ways together.
VERSIONS = {1: "1", 2: "2", 3: "2.2", 4: "3", 5: "3", 6: "4", 7: "5", 8: "6"}
LINK_RATES = {"1": 20e9, "2": 25e9, "2.2": 25e9, "3": 25e9, "4": 25e9, "5": 50e9}
LANE_RATES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes/s of a PCIe lane in one direction, encoding taken off, by generation."""
WAYS = {
    0: "one board",
    10: "PIX",
    20: "PXB",
    30: "PHB",
    40: "NODE",
    50: "SYS",
}
"""NVML's nvmlGpuTopologyLevel_t in the words of ``nvidia-smi topo -m``."""
LEGEND = (
    "NVn: n NVLink links; else what PCIe traffic crosses: PIX one switch, PXB several,"
    " PHB the host bridge, NODE host bridges of a NUMA node, SYS the link between nodes"
)
# nvmlGpuP2PCapsIndex_t; pynvml's NVML_P2P_CAPS_INDEX_READ is a tuple, so they are numbers here.
CAPS = {"read": 0, "write": 1, "nvlink": 2, "atomics": 3}
STATUS = {
    0: "OK",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "topology not supported",
    4: "disabled by registry key",
    5: "not supported",
}


@dataclass(frozen=True)
class Link:
    """One active NVLink link of a GPU: its number, version, and what is at its other end."""

    number: int
    version: str
    peer: str


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        index: NVML's, which is nvidia-smi's.
        bus: PCI bus id, as ``00000000:18:00.0``.
        numa: node whose memory is nearest, or None; cpus: the nearest cores, as ``0-31,64-95``.
        pcie: generation and lanes that GPU and slot can do, or None.
        visible: whether ``CUDA_VISIBLE_DEVICES`` leaves it.
    """

    index: int
    name: str
    uuid: str
    bus: str
    numa: int | None
    cpus: str
    pcie: tuple[int, int] | None
    links: tuple[Link, ...]
    visible: bool = True

    @property
    def label(self) -> str:
        return f"GPU {self.index}"


@dataclass(frozen=True)
class Way:
    """How traffic gets from one GPU to another.

    Attributes:
        ancestor: what PCIe traffic between them crosses, as in `WAYS`, or empty.
        access: by capability of `CAPS`, ``OK`` or why not; empty where nobody says.
        links: NVLink links that the two share, through switches or directly.
        version: NVLink's.
        pcie: generation and lanes of the slower of the two, or None.
    """

    source: int
    target: int
    ancestor: str
    access: dict[str, str]
    links: int = 0
    version: str = ""
    pcie: tuple[int, int] | None = None

    @property
    def cell(self) -> str:
        """``NV18``, or what PCIe traffic crosses."""
        return f"NV{self.links}" if self.links else self.ancestor or "?"

    @property
    def kind(self) -> str:
        """What ways must have in common to be held against each other."""
        if self.links:
            return f"NVLink {self.version or '?'} x{self.links}"
        name = "PCIe {} x{}".format(*self.pcie) if self.pcie else "PCIe"
        direct = self.access.get("read") in (None, "OK")
        return f"{name}, {self.ancestor or '?'}" + ("" if direct else ", no peer access")

    @property
    def limit(self) -> float | None:
        """Bytes/s in one direction that the links can carry, or None where that is unknown."""
        if self.links:
            rate = LINK_RATES.get(self.version)
            return rate and rate * self.links
        if self.pcie is None or self.pcie[0] not in LANE_RATES:
            return None
        return LANE_RATES[self.pcie[0]] * self.pcie[1]


@dataclass(frozen=True)
class Topology:
    """Every GPU that NVML knows, and the way between each ordered pair."""

    gpus: tuple[Gpu, ...]
    ways: tuple[Way, ...]

    def gpu(self, uuid: str) -> Gpu | None:
        """Return the GPU with this UUID, or None."""
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)

    def way(self, source: int, target: int) -> Way:
        """Return the way between the GPUs with these indices."""
        return next(w for w in self.ways if (w.source, w.target) == (source, target))

    def plain(self) -> dict[str, Any]:
        """Return JSON types."""
        ways = [asdict(w) | {"kind": w.kind, "limit": w.limit} for w in self.ways]
        return {"gpus": [asdict(gpu) for gpu in self.gpus], "ways": ways}


def read() -> Topology:
    """Return the machine's topology; without a GPU it is empty."""
    nvml = device._nvml()
    if nvml is None:
        return Topology((), ())
    handles = device._handles(nvml)
    buses = [_bus(nvml.nvmlDeviceGetPciInfo(handle)) for handle in handles]
    gpus = tuple(_gpu(nvml, i, handle, buses) for i, handle in enumerate(handles))
    ways = [
        _way(partial(_pair, nvml, handles[a.index], handles[b.index]), a, b)
        for a in gpus
        for b in gpus
        if a is not b
    ]
    return Topology(gpus, tuple(ways))


def joined(uuids: Sequence[str]) -> str | None:
    """Return how these GPUs are joined, as ``NVLink 4 x18``; each kind of way once, or None."""
    found = read()
    gpus = [gpu.index for gpu in map(found.gpu, uuids) if gpu is not None]
    kinds = {w.kind for w in found.ways if w.source in gpus and w.target in gpus}
    return "; ".join(sorted(kinds)) if len(gpus) == len(uuids) and kinds else None


def _gpu(nvml: Any, index: int, handle: Any, buses: Sequence[str]) -> Gpu:
    generation = _asked(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    lanes = _asked(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    words = max(os.cpu_count() or 1, os.sysconf("SC_NPROCESSORS_CONF")) // 64 + 1
    cores = _bits(_asked(nvml.nvmlDeviceGetCpuAffinity, handle, words) or [])
    return Gpu(
        index,
        str(nvml.nvmlDeviceGetName(handle)),
        str(nvml.nvmlDeviceGetUUID(handle)),
        buses[index],
        _numa(nvml, handle, buses[index]),
        _ranges(cores),
        (generation, lanes) if generation and lanes else None,
        tuple(_links(nvml, handle, buses)),
        device._visible(nvml, handle),
    )


def _bus(info: Any) -> str:
    bus = info.busId
    return (bus.decode() if isinstance(bus, bytes) else str(bus)).strip("\0").lower()


def _numa(nvml: Any, handle: Any, bus: str) -> int | None:
    """Return the GPU's NUMA node: the kernel's word, or else NVML's, or None."""
    domain, _, rest = bus.partition(":")
    try:
        node = int((PCI / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        node = -1  # what the kernel says where it does not know
    if node >= 0:
        return node
    nodes = _bits(_asked(nvml.nvmlDeviceGetMemoryAffinity, handle, 16, 0) or [])
    return nodes[0] if len(nodes) == 1 else None


def _bits(words: Sequence[int]) -> list[int]:
    return [64 * k + bit for k, word in enumerate(words) for bit in range(64) if word >> bit & 1]


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending `numbers` as ``0-31,64``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _links(nvml: Any, handle: Any, buses: Sequence[str]) -> list[Link]:
    found = []
    for number in range(MOST_LINKS):
        if not _asked(nvml.nvmlDeviceGetNvLinkState, handle, number):
            continue  # not there, or down
        version = VERSIONS.get(_asked(nvml.nvmlDeviceGetNvLinkVersion, handle, number) or 0, "")
        remote = _asked(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, number)
        kind = _asked(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, number)
        found.append(Link(number, version, _peer(remote and _bus(remote), kind, buses)))
    return found


def _peer(bus: str | None, kind: int | None, buses: Sequence[str]) -> str:
    if bus in buses:
        return f"GPU {buses.index(bus)}"
    return SWITCH if kind == 2 else "unknown"


def _pair(nvml: Any, first: Any, second: Any) -> tuple[int | None, dict[str, int]]:
    """Return what NVML says of a pair: the common ancestor, and the status of each capability."""
    said = {n: _asked(nvml.nvmlDeviceGetP2PStatus, first, second, i) for n, i in CAPS.items()}
    level = _asked(nvml.nvmlDeviceGetTopologyCommonAncestor, first, second)
    return level, {name: status for name, status in said.items() if status is not None}


def _way(ask: Any, a: Gpu, b: Gpu) -> Way:
    level, statuses = ask()
    access = {name: STATUS.get(status, "unknown") for name, status in statuses.items()}
    links, version = _shared(a, b, access.get("nvlink"))
    pcie = min((g.pcie for g in (a, b) if g.pcie), default=None)
    known = pcie if a.pcie and b.pcie else None
    return Way(a.index, b.index, WAYS.get(level, ""), access, links, version, known)


def _shared(a: Gpu, b: Gpu, nvlink: str | None) -> tuple[int, str]:
    """Return how many NVLink links two GPUs share, and their version."""
    direct = [link for link in a.links if link.peer == b.label]
    if direct:
        return len(direct), direct[0].version
    through = [[k for k in g.links if not k.peer.startswith("GPU ")] for g in (a, b)]
    switched = all(k and all(link.peer == SWITCH for link in k) for k in through)
    if not all(through) or not (nvlink == "OK" or (nvlink is None and switched)):
        return 0, ""
    fewer = min(through, key=len)
    return len(fewer), fewer[0].version


def topology_result(*, as_json: bool) -> CliResult:
    """Return what `aisp topology` prints.

    Raises:
        Unanswerable: where there is no GPU, with exit code 1.
    """
    found = read()
    if not found.gpus:
        raise CliError(
            "no GPU is here: NVML finds none, or its driver is not loaded\n"
            "See what the driver says:\n    nvidia-smi",
            code=1,
        )
    return CliResult([json.dumps(found.plain(), indent=1)] if as_json else words(found))


def words(found: Topology) -> list[str]:
    """Return the tables: the GPUs, what is between them, and who may read whom."""
    heads = ("GPU", "name", "UUID", "PCI bus id", "PCIe", "NUMA", "CPUs", "NVLink")
    lines = columns([heads, *map(_row, found.gpus)])
    if len(found.gpus) > 1:
        lines += ["", "between them", *_matrix(found, lambda way: way.cell), LEGEND]
        lines += ["", "peer access, read", *_matrix(found, lambda way: _access(way, "read"))]
    return lines


def _row(gpu: Gpu) -> tuple[str, ...]:
    shown = f"{gpu.index}" + ("" if gpu.visible else " (not visible)")
    pcie = "{} x{}".format(*gpu.pcie) if gpu.pcie else "?"
    numa = "?" if gpu.numa is None else str(gpu.numa)
    return shown, gpu.name, gpu.uuid, gpu.bus, pcie, numa, gpu.cpus or "?", _link_words(gpu)


def _link_words(gpu: Gpu) -> str:
    if not gpu.links:
        return "no link"
    peers = Counter(link.peer for link in gpu.links)
    versions = "/".join(sorted({link.version or "?" for link in gpu.links}))
    return f"NVLink {versions}: " + ", ".join(f"{n} to {peer}" for peer, n in peers.items())


def _access(way: Way, capability: str) -> str:
    said = way.access.get(capability)
    return {"OK": "yes", None: "?"}.get(said, f"no: {said}")


def _matrix(found: Topology, cell: Any) -> list[str]:
    rows = [["from \\ to", *(str(gpu.index) for gpu in found.gpus)]]
    for a in found.gpus:
        cells = ["-" if a is b else cell(found.way(a.index, b.index)) for b in found.gpus]
        rows.append([str(a.index), *cells])
    return columns(rows)
