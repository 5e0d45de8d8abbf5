"""`aisp links topology` on simulated machines: NVSwitch, a mesh, bridges, PCIe only."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from pytest_aisp.cli import app
from pytest_aisp.distributed import topology
from pytest_aisp.distributed.topology import Link, Route
from pytest_aisp.util import device

OK, NOT_SUPPORTED, TOPOLOGY = 0, 5, 3


class Refused(Exception):
    """The exception of an NVML that does not answer."""


def bus_of(gpu):
    return f"00000000:{gpu + 1:02X}:00.0"


class Nvml:
    """A fake NVML with `count` GPUs.

    `links` lists for each GPU the far end of each link: a GPU's number, ``switch``, ``hidden`` or
    ``down``.
    """

    def __init__(self, count, links=(), *, version=6, nvlink=OK, read=OK, level=50):
        self.count, self.links, self.version = count, list(links) or [()] * count, version
        self.nvlink, self.read, self.level = nvlink, read, level

    def nvmlDeviceGetCount(self):
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    nvmlDeviceGetIndex = nvmlDeviceGetHandleByIndex

    def nvmlDeviceGetName(self, gpu):
        return "NVIDIA H200"

    def nvmlDeviceGetUUID(self, gpu):
        return f"GPU-{gpu}"

    def nvmlDeviceGetPciInfo(self, gpu):
        return SimpleNamespace(busId=bus_of(gpu).encode())

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu):
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, gpu):
        return 16

    def nvmlDeviceGetCpuAffinity(self, gpu, words):
        return [0b1011 << (4 * gpu), *[0] * (words - 1)]

    def nvmlDeviceGetMemoryAffinity(self, gpu, words, scope):
        return [1 << gpu, *[0] * (words - 1)]

    def _end(self, gpu, link):
        ends = self.links[gpu]
        if link >= len(ends):
            raise Refused
        return ends[link]

    def nvmlDeviceGetNvLinkState(self, gpu, link):
        return int(self._end(gpu, link) != "down")

    def nvmlDeviceGetNvLinkVersion(self, gpu, link):
        return self.version

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu, link):
        end = self._end(gpu, link)
        if end == "hidden":
            raise Refused
        return SimpleNamespace(busId=bus_of(end) if isinstance(end, int) else "00000000:A0:00.0")

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu, link):
        end = self._end(gpu, link)
        if end == "hidden":
            raise Refused
        return 2 if end == "switch" else 0

    def nvmlDeviceGetTopologyCommonAncestor(self, a, b):
        return self.level

    def nvmlDeviceGetP2PStatus(self, a, b, capability):
        assert isinstance(capability, int)  # pynvml's constant for reading is a tuple
        return self.nvlink if capability == 2 else self.read


def nvml_of(*args, refused=(), **kwargs):
    """Return a fake NVML whose functions in `refused` raise."""
    nvml = Nvml(*args, **kwargs)

    def no(*args):
        raise Refused

    for name in refused:
        setattr(nvml, name, no)
    return nvml


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Simulate a machine whose NUMA nodes are not in this machine's /sys; return its topology."""
    monkeypatch.setattr(topology, "PCI", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def simulate(*args, **kwargs):
        monkeypatch.setattr(device, "load_nvml", lambda: nvml_of(*args, **kwargs))
        return topology.read_topology()

    return simulate


SWITCHED = [["switch"] * 18] * 2


def test_a_switched_route_has_the_smaller_number_of_links(machine):
    topo = machine(2, [["switch"] * 18, ["switch"] * 17 + ["down"]])
    assert topo.gpus[0].links[0] == Link(0, "4", "NVSwitch")
    route = topo.route(0, 1)
    assert (route.links, route.kind, route.label) == (17, "NVLink 4 x17", "NV17")
    assert route.limit == 17 * 25e9


def test_direct_links_belong_to_one_pair(machine):
    topo = machine(3, [[1, 1, 2], [0, 0], [0]], version=5)  # an A100 says 5: NVLink 3
    assert topo.route(0, 1).kind == topo.route(1, 0).kind == "NVLink 3 x2"
    assert topo.route(0, 2).limit == 25e9
    assert topo.route(1, 2).kind == "PCIe 5 x16, SYS"  # NVLink each, but not to each other
    assert topo.route(1, 2).limit == pytest.approx(16 * 3.938e9)


def test_hidden_link_ends_count_if_nvml_reports_nvlink_access(machine):
    ends = [["hidden"] * 18] * 2
    assert machine(2, ends).route(0, 1).kind == "NVLink 4 x18"
    assert machine(2, ends, nvlink=NOT_SUPPORTED).route(0, 1).kind == "PCIe 5 x16, SYS"
    silent = {"refused": ["nvmlDeviceGetP2PStatus"]}
    assert machine(2, ends, **silent).route(0, 1).links == 0
    assert machine(2, SWITCHED, **silent).route(0, 1).links == 18


def test_route_kinds_lists_each_kind_once(machine):
    machine(3, [[1, 1, 2], [0, 0], [0]], version=5)
    assert topology.route_kinds(["GPU-0", "GPU-1"]) == "NVLink 3 x2"
    assert topology.route_kinds(["GPU-0", "GPU-1", "GPU-2"]) == (
        "NVLink 3 x1; NVLink 3 x2; PCIe 5 x16, SYS"
    )
    assert topology.route_kinds(["GPU-0", "another's"]) is None
    assert topology.route_kinds(["GPU-0"]) is None


def test_a_switch_without_a_running_fabric_is_no_link(machine):
    assert machine(2, SWITCHED, nvlink=NOT_SUPPORTED).route(0, 1).kind == "PCIe 5 x16, SYS"


def test_an_unknown_nvlink_version_has_no_limit(machine):
    route = machine(2, SWITCHED, version=99).route(0, 1)
    assert (route.kind, route.limit) == ("NVLink ? x18", None)


def test_kind_mentions_missing_peer_access(machine):
    route = machine(2, nvlink=NOT_SUPPORTED, read=TOPOLOGY).route(0, 1)
    assert route.kind == "PCIe 5 x16, SYS, no peer access"
    assert route.access["read"] == "topology not supported"


def test_refused_queries_show_as_unknown(machine):
    names = ["TopologyCommonAncestor", "P2PStatus", "MaxPcieLinkWidth"]
    names += ["CpuAffinity", "MemoryAffinity"]
    topo = machine(2, refused=[f"nvmlDeviceGet{name}" for name in names])
    gpu, route = topo.gpus[0], topo.route(0, 1)
    assert (gpu.pcie, gpu.cpus, gpu.numa) == (None, "", None)
    assert (route.kind, route.limit, route.label) == ("PCIe, ?", None, "?")
    assert topology.topology_tables(topo)[1].split()[5:] == ["?", "?", "?", "no", "link"]


def test_numa_node_comes_from_the_kernel_then_from_nvml(machine, tmp_path):
    folder = tmp_path / "0000:01:00.0"
    folder.mkdir()
    node = folder / "numa_node"
    node.write_text("3\n")
    assert [gpu.numa for gpu in machine(2).gpus] == [3, 1]
    node.write_text("-1\n")  # a virtual machine's kernel does not know
    assert machine(2).gpus[0].numa == 0


def test_cores_are_shown_as_ranges(machine):
    assert [gpu.cpus for gpu in machine(2).gpus] == ["0-1,3", "4-5,7"]


def test_hidden_gpus_are_marked(machine, monkeypatch):
    machine(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    assert [gpu.visible for gpu in topology.read_topology().gpus] == [False, True]
    assert "0 (not visible)" in "\n".join(topology.topology_tables(topology.read_topology()))


def test_tables_show_gpus_routes_and_access(machine, capsys):
    machine(2, SWITCHED, level=20)
    assert app.main(["topology"]) == 0
    pytest.LineMatcher(capsys.readouterr().out.splitlines()).fnmatch_lines(
        [
            "GPU  name         UUID   PCI bus id        PCIe   NUMA  CPUs   NVLink",
            "0 * NVIDIA H200  GPU-0  00000000:01:00.0  5 x16  0  * 0-1,3  NVLink 4: 18 to NVSwitch",
            "between them",
            "from \\ to  0     1",
            "0          -     NV18",
            "NVn: n NVLink links; *",
            "peer access, read",
            "1          yes  -",
        ]
    )


def test_one_gpu_has_no_matrix(machine, capsys):
    machine(1)
    assert app.main(["topology"]) == 0
    assert "between them" not in capsys.readouterr().out


def test_json_holds_links_limits_and_access(machine, capsys):
    machine(2, SWITCHED)
    assert app.main(["topology", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["gpus"][1]["links"][17] == {"number": 17, "version": "4", "peer": "NVSwitch"}
    assert plain["ways"][0]["limit"] == 450e9
    assert plain["ways"][0]["access"]["read"] == "OK"


def test_refused_access_shows_the_reason():
    refused = Route(0, 1, "", {"read": "chipset not supported"})
    assert topology.read_access(refused) == "no: chipset not supported"
    assert topology.read_access(Route(0, 1, "", {})) == "?"


def test_no_gpu_is_an_error_with_a_next_step(monkeypatch, capsys):
    monkeypatch.setattr(device, "load_nvml", lambda: None)
    assert app.main(["topology"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == [
        "no GPU is here: NVML finds none, or its driver is not loaded",
        "See what the driver says:",
        "    nvidia-smi",
    ]
