"""The GPUs of this machine and the routes between them, as NVML and the kernel report them.

This module never calls CUDA. Values that a driver or a container does not report are shown as
unknown.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType

from ..util import device
from ..util.cli_result import CliError, CliResult, columns
from ..util.device import PCI, numa_node, query

NVSWITCH = "NVSwitch"
MAX_LINKS = 36
"""The most links per GPU that NVML can report: NVML_NVLINK_MAX_LINKS as of NVLink 6."""
# NVML has its own numbers for NVLink versions (nvmlNvlinkVersion_t). For example, an A100 reports
# 5. LINK_RATES are the bytes/s of one link in one direction, from NVIDIA's data sheets. For
# example, an H200 has 18 links of NVLink 4, with 900 GB/s in both directions together.
NVLINK_VERSIONS = {1: "1", 2: "2", 3: "2.2", 4: "3", 5: "3", 6: "4", 7: "5", 8: "6"}
LINK_RATES = {"1": 20e9, "2": 25e9, "2.2": 25e9, "3": 25e9, "4": 25e9, "5": 50e9}
LANE_RATES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""The bytes/s of a PCIe lane in one direction, without encoding overhead, by generation."""
ANCESTORS = {0: "one board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""The names that ``nvidia-smi topo -m`` shows, keyed by NVML's nvmlGpuTopologyLevel_t."""
LEGEND = (
    "NVn: n NVLink links; else what PCIe traffic crosses: PIX one switch, PXB several,"
    " PHB the host bridge, NODE host bridges of a NUMA node, SYS the link between nodes"
)
# The values of nvmlGpuP2PCapsIndex_t, as numbers, because in pynvml the constant
# NVML_P2P_CAPS_INDEX_READ is a tuple.
P2P_CAPABILITIES = {"read": 0, "write": 1, "nvlink": 2, "atomics": 3}
P2P_STATUS = {
    0: "OK",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "topology not supported",
    4: "disabled by registry key",
    5: "not supported",
}


@dataclass(frozen=True)
class Link:
    """One active NVLink link of a GPU: its number, its version, and the device at its far end."""

    number: int
    version: str
    peer: str


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        index: the GPU's index in NVML and in nvidia-smi.
        bus: the PCI bus id, such as ``00000000:18:00.0``.
        numa: the nearest NUMA node, or None.
        cpus: the nearest cores, such as ``0-31,64-95``.
        pcie: the highest PCIe generation and the most lanes that the GPU and the slot both support,
            or None.
        visible: False if ``CUDA_VISIBLE_DEVICES`` hides the GPU.
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
class Route:
    """The route of traffic from one GPU to another.

    Attributes:
        ancestor: the topology level that PCIe traffic between the two GPUs crosses, one of the
            names in `ANCESTORS`, or an empty string.
        access: ``OK`` for each known capability of peer access, or the reason why it is missing.
        links: the number of NVLink links between the two GPUs, direct or through switches.
        version: the version of NVLink.
        pcie: the PCIe generation and lanes of the slower of the two GPUs, or None.
    """

    source: int
    target: int
    ancestor: str
    access: dict[str, str]
    links: int = 0
    version: str = ""
    pcie: tuple[int, int] | None = None

    @property
    def label(self) -> str:
        """The route's short name: ``NV18`` for 18 NVLink links, or else `ancestor`."""
        return f"NV{self.links}" if self.links else self.ancestor or "?"

    @property
    def kind(self) -> str:
        """The kind of route. Only routes of the same kind are compared with each other."""
        if self.links:
            return f"NVLink {self.version or '?'} x{self.links}"
        name = "PCIe {} x{}".format(*self.pcie) if self.pcie else "PCIe"
        direct = self.access.get("read") in (None, "OK")
        return f"{name}, {self.ancestor or '?'}" + ("" if direct else ", no peer access")

    @property
    def limit(self) -> float | None:
        """The bytes/s that the links can carry in one direction, or None if unknown."""
        if self.links:
            rate = LINK_RATES.get(self.version)
            return rate and rate * self.links
        if self.pcie is None or self.pcie[0] not in LANE_RATES:
            return None
        return LANE_RATES[self.pcie[0]] * self.pcie[1]


@dataclass(frozen=True)
class Topology:
    """Every GPU that NVML reports, and the route between each ordered pair of GPUs."""

    gpus: tuple[Gpu, ...]
    routes: tuple[Route, ...]

    def gpu(self, uuid: str) -> Gpu | None:
        """Return the GPU with this UUID, or None."""
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)

    def route(self, source: int, target: int) -> Route:
        """Return the route between the GPUs with these indices."""
        return next(r for r in self.routes if (r.source, r.target) == (source, target))

    def to_json(self) -> str:
        """Return the JSON text that `aisp links topology --json` prints."""
        routes = [asdict(r) | {"kind": r.kind, "limit": r.limit} for r in self.routes]
        return json.dumps({"gpus": [asdict(gpu) for gpu in self.gpus], "ways": routes}, indent=1)


def read_topology() -> Topology:
    """Return the machine's topology, which is empty if there is no GPU."""
    nvml = device.load_nvml()
    if nvml is None:
        return Topology((), ())
    handles = device.gpu_handles(nvml)
    buses = [_bus_id(nvml.nvmlDeviceGetPciInfo(handle)) for handle in handles]
    gpus = tuple(_read_gpu(nvml, i, handle, buses) for i, handle in enumerate(handles))
    routes = [_read_route(nvml, handles, a, b) for a in gpus for b in gpus if a is not b]
    return Topology(gpus, tuple(routes))


def route_kinds(uuids: Sequence[str]) -> str | None:
    """Return the kinds of routes between these GPUs, such as ``NVLink 4 x18``, or None."""
    topology = read_topology()
    gpus = [gpu.index for gpu in map(topology.gpu, uuids) if gpu is not None]
    kinds = {r.kind for r in topology.routes if r.source in gpus and r.target in gpus}
    return "; ".join(sorted(kinds)) if len(gpus) == len(uuids) and kinds else None


def _read_gpu(nvml: ModuleType, index: int, handle: object, buses: Sequence[str]) -> Gpu:
    generation = query(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    lanes = query(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    words = max(os.cpu_count() or 1, os.sysconf("SC_NPROCESSORS_CONF")) // 64 + 1
    cores = _set_bits(query(nvml.nvmlDeviceGetCpuAffinity, handle, words) or [])
    return Gpu(
        index,
        str(nvml.nvmlDeviceGetName(handle)),
        str(nvml.nvmlDeviceGetUUID(handle)),
        buses[index],
        _read_numa_node(nvml, handle, buses[index]),
        _as_ranges(cores),
        (generation, lanes) if generation and lanes else None,
        tuple(_read_links(nvml, handle, buses)),
        device.is_visible(nvml, handle),
    )


def _bus_id(info: object) -> str:
    bus = getattr(info, "busId", "")
    return (bus.decode() if isinstance(bus, bytes) else str(bus)).strip("\0").lower()


def _read_numa_node(nvml: ModuleType, handle: object, bus: str) -> int | None:
    """Return the GPU's NUMA node from the Linux kernel or NVML, or None if it is unknown."""
    node = numa_node(bus, PCI)
    if node is not None:
        return node
    nodes = _set_bits(query(nvml.nvmlDeviceGetMemoryAffinity, handle, 16, 0) or [])
    return nodes[0] if len(nodes) == 1 else None


def _set_bits(words: Sequence[int]) -> list[int]:
    return [64 * k + bit for k, word in enumerate(words) for bit in range(64) if word >> bit & 1]


def _as_ranges(numbers: Sequence[int]) -> str:
    """Return ascending `numbers` as ``0-31,64``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _read_links(nvml: ModuleType, handle: object, buses: Sequence[str]) -> list[Link]:
    links = []
    for number in range(MAX_LINKS):
        if not query(nvml.nvmlDeviceGetNvLinkState, handle, number):
            continue  # the link does not exist, or is down
        version = query(nvml.nvmlDeviceGetNvLinkVersion, handle, number) or 0
        remote = query(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, number)
        kind = query(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, number)
        peer = _peer_name(remote and _bus_id(remote), kind, buses)
        links.append(Link(number, NVLINK_VERSIONS.get(version, ""), peer))
    return links


def _peer_name(bus: str | None, kind: int | None, buses: Sequence[str]) -> str:
    if bus in buses:
        return f"GPU {buses.index(bus)}"
    return NVSWITCH if kind == 2 else "unknown"


def _read_route(nvml: ModuleType, handles: Sequence[object], a: Gpu, b: Gpu) -> Route:
    pair = handles[a.index], handles[b.index]
    level: int | None = query(nvml.nvmlDeviceGetTopologyCommonAncestor, *pair)
    ancestor = "" if level is None else ANCESTORS.get(level, "")
    access = {}
    for name, capability in P2P_CAPABILITIES.items():
        status = query(nvml.nvmlDeviceGetP2PStatus, *pair, capability)
        if status is not None:
            access[name] = P2P_STATUS.get(status, "unknown")
    links, version = _shared_links(a, b, access.get("nvlink"))
    pcie = min(a.pcie, b.pcie) if a.pcie and b.pcie else None
    return Route(a.index, b.index, ancestor, access, links, version, pcie)


def _shared_links(a: Gpu, b: Gpu, nvlink: str | None) -> tuple[int, str]:
    """Return the number of NVLink links between two GPUs, and their version."""
    direct = [link for link in a.links if link.peer == b.label]
    if direct:
        return len(direct), direct[0].version
    indirect = [[k for k in g.links if not k.peer.startswith("GPU ")] for g in (a, b)]
    switched = all(k and all(link.peer == NVSWITCH for link in k) for k in indirect)
    if not all(indirect) or not (nvlink == "OK" or (nvlink is None and switched)):
        return 0, ""
    fewer = min(indirect, key=len)
    return len(fewer), fewer[0].version


def topology_result(*, as_json: bool) -> CliResult:
    """Return the output of `aisp links topology`.

    Raises:
        CliError: if there is no GPU. The exit code is 1.
    """
    topology = read_topology()
    if not topology.gpus:
        raise CliError(
            "no GPU is here: NVML finds none, or its driver is not loaded\n"
            "See what the driver says:\n    nvidia-smi",
            code=1,
        )
    return CliResult([topology.to_json()] if as_json else topology_tables(topology))


def topology_tables(topology: Topology) -> list[str]:
    """Return three tables: the GPUs, the routes between them, and the peer access."""
    heads = ("GPU", "name", "UUID", "PCI bus id", "PCIe", "NUMA", "CPUs", "NVLink")
    lines = columns([heads, *map(_gpu_row, topology.gpus)])
    if len(topology.gpus) > 1:
        lines += ["", "between them", *_matrix(topology, lambda route: route.label), LEGEND]
        lines += ["", "peer access, read", *_matrix(topology, read_access)]
    return lines


def _gpu_row(gpu: Gpu) -> tuple[str, ...]:
    shown = f"{gpu.index}" + ("" if gpu.visible else " (not visible)")
    pcie = "{} x{}".format(*gpu.pcie) if gpu.pcie else "?"
    numa = "?" if gpu.numa is None else str(gpu.numa)
    return shown, gpu.name, gpu.uuid, gpu.bus, pcie, numa, gpu.cpus or "?", _link_cell(gpu)


def _link_cell(gpu: Gpu) -> str:
    if not gpu.links:
        return "no link"
    peers = Counter(link.peer for link in gpu.links)
    versions = "/".join(sorted({link.version or "?" for link in gpu.links}))
    return f"NVLink {versions}: " + ", ".join(f"{n} to {peer}" for peer, n in peers.items())


def read_access(route: Route) -> str:
    """Return whether the source can read the target's memory: ``yes``, ``no: reason``, or ``?``."""
    status = route.access.get("read")
    return {"OK": "yes", None: "?"}.get(status, f"no: {status}")


def _matrix(topology: Topology, cell: Callable[[Route], str]) -> list[str]:
    rows = [["from \\ to", *(str(gpu.index) for gpu in topology.gpus)]]
    for a in topology.gpus:
        cells = ["-" if a is b else cell(topology.route(a.index, b.index)) for b in topology.gpus]
        rows.append([str(a.index), *cells])
    return columns(rows)
