"""Facts and telemetry of a simulated GPU, and the leases of a machine."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from worker_processes import wait_for

from pytest_aisp.util import device, device_state, gpu_lease
from pytest_aisp.util.device_state import OtherProcesses, Telemetry

STRANGER = 1  # init: never a worker process


class Nvml:
    """A fake NVML with fixed answers."""

    NVML_CLOCK_SM = NVML_TEMPERATURE_GPU = 0

    def __init__(self, *, reasons=0, busy=(), known=None):
        self.reasons, self.busy = reasons, busy
        self.known = [os.getpid(), *busy] if known is None else known

    def __getattr__(self, name):
        return lambda *args: 0

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return "the GPU"

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self.reasons

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=pid) for pid in self.known]

    def nvmlDeviceGetProcessUtilization(self, handle, since):
        return [SimpleNamespace(pid=pid, smUtil=40, timeStamp=since + 1) for pid in self.busy]


@pytest.fixture
def telemetry(monkeypatch):
    properties = SimpleNamespace(uuid="0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)

    def make(**answers):
        monkeypatch.setattr(device, "load_nvml", lambda: Nvml(**answers))
        return Telemetry(0)

    return make


def test_an_idle_gpu_has_no_disturbance(telemetry):
    assert telemetry().look() is None


@pytest.mark.parametrize(("bit", "name"), device_state.THROTTLED.items())
def test_throttling_is_reported(telemetry, bit, name):
    assert telemetry(reasons=bit).look() == name


def test_the_power_cap_is_not_reported(telemetry):
    assert telemetry(reasons=0x4).look() is None


@pytest.fixture
def others(monkeypatch, telemetry):
    """Return the GPU shares of other processes, by process name, with a fake NVML."""

    def shares(**answers):
        telemetry(**answers)
        return OtherProcesses(0).shares()

    return shares


def test_another_process_on_the_gpu_is_reported(others):
    [(name, share)] = others(busy=[STRANGER]).items()
    assert name.startswith(f"process {STRANGER} (")
    assert share == 0.4


def test_our_processes_and_hidden_ids_are_not_reported(others, monkeypatch):
    assert others(busy=[STRANGER], known=[STRANGER]) == {}
    assert others(busy=[os.getpid()]) == {}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert others(busy=[child.pid]) == {}, "a side's own process is no neighbor"
        child.communicate(b"\n")
    monkeypatch.setattr(device_state, "is_worker", lambda pid: pid == STRANGER)
    assert others(busy=[STRANGER]) == {}
    monkeypatch.setattr(device_state, "is_worker", lambda pid: False)
    monkeypatch.setattr(device, "read_text", lambda file: "nvidia-cuda-mps")
    assert others(busy=[STRANGER]) == {}, "MPS computes for this process too"


def test_nvml_is_asked_rarely_unless_the_gpu_is_disturbed(telemetry):
    watched = telemetry(reasons=0x8)
    causes = [watched.disturbance() for _ in range(Telemetry.EVERY + 2)]
    assert causes == [None] * (Telemetry.EVERY - 1) + ["hardware slowdown"] * 3


def test_each_look_records_its_block(telemetry):
    watched = telemetry(reasons=0x8)
    for _ in range(Telemetry.EVERY + 1):
        watched.disturbance()
    assert [at for at, *_ in watched.looks()] == [0, Telemetry.EVERY, Telemetry.EVERY + 1]
    (low, high), (_, mhz, *_) = watched.summary()["sm_mhz"], watched.looks()[0]
    assert low <= mhz <= high


@pytest.mark.parametrize(
    ("content", "governor"),
    [({}, None), ({0: "performance\n"}, "performance"), ({0: "b\n", 1: "a\n"}, "a, b")],
)
def test_governor_covers_the_usable_cores(tmp_path, monkeypatch, content, governor):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    for core, word in {**content, 2: "not ours"}.items():
        folder = tmp_path / f"cpu{core}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(word)
    assert device.governor(tmp_path) == governor


@pytest.mark.parametrize(
    ("content", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), (None, None)]
)
def test_numa_node_is_looked_up_by_pci_bus_id(tmp_path, content, node):
    folder = tmp_path / "0001:0f:00.0"
    folder.mkdir()
    if content is not None:
        (folder / "numa_node").write_text(content)
    assert device.numa_node("00000001:0F:00.0", tmp_path) == node


@pytest.fixture
def nvml(monkeypatch):
    """A fake NVML with one GPU that answers every query."""
    fake = Nvml()
    for name, answer in {
        "DeviceGetCount": 1,
        "DeviceGetName": "NVIDIA H200",
        "DeviceGetCudaComputeCapability": (9, 0),
        "SystemGetCudaDriverVersion": 13000,
        "SystemGetDriverVersion": "580.1",
        "DeviceGetUUID": "GPU-a",
        "DeviceGetEnforcedPowerLimit": 700_000,
        "DeviceGetMigMode": [1, 0],
        "DeviceGetPciInfo": SimpleNamespace(busId="0000FFFF:0F:00.0"),
    }.items():
        monkeypatch.setattr(fake, f"nvml{name}", lambda *args, answer=answer: answer, raising=False)
    monkeypatch.setattr(device, "load_nvml", lambda: fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_facts_of_a_gpu_are_recorded(nvml):
    facts = device.Machine.here().facts
    assert (facts["power_limit_w"], facts["mig"]) == (700, True)
    assert facts["board"] == hashlib.sha256(b"GPU-a").hexdigest()[:12]
    assert facts["numa_node"] is None  # no such device here
    assert facts["cpu"] == device.cpu_name()
    assert "governor" in facts


@pytest.mark.parametrize(
    ("named", "seen"),
    [
        ("0", True),
        ("1, 0", True),
        ("GPU-ab12cd34", True),
        ("GPU-ab12", True),  # CUDA takes a beginning, too
        ("1", False),
        ("GPU-cd", False),
        ("", False),
        ("-1", False),
        (" , ", False),
        ("GPU-ab12cd345", False),
    ],
)
def test_visible_devices_are_an_index_or_a_uuid_prefix(nvml, monkeypatch, named, seen):
    monkeypatch.setattr(nvml, "nvmlDeviceGetUUID", lambda handle: "GPU-ab12cd34", raising=False)
    monkeypatch.setattr(nvml, "nvmlDeviceGetIndex", lambda handle: 0, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert device.is_visible(nvml, 0) is seen


def test_refused_nvml_queries_are_unknown(nvml, monkeypatch):
    def refused(handle):
        raise RuntimeError("Not Supported")

    for name in ("EnforcedPowerLimit", "MigMode", "PciInfo"):
        monkeypatch.setattr(nvml, f"nvmlDeviceGet{name}", refused, raising=False)
    facts = device.Machine.here().facts
    assert {facts[name] for name in ("power_limit_w", "mig", "numa_node")} == {None}


def test_a_cpu_is_recorded_by_model():
    assert device.cpu_machine().facts["cpu"] == device.cpu_name()


def test_a_worker_is_recognized_by_command_and_lease_folder(tmp_path, monkeypatch):
    assert not gpu_lease.is_worker(os.getpid())
    assert not gpu_lease.is_worker(2**30)
    monkeypatch.setenv("AISP_LEASES", str(tmp_path))
    command = [sys.executable, "-c", "input()", "pytest_aisp.worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as other:
        wait_for(lambda: gpu_lease.is_worker(other.pid))  # it may not have begun yet
        monkeypatch.setenv("AISP_LEASES", str(tmp_path / "elsewhere"))
        assert not gpu_lease.is_worker(other.pid), "nobody takes turns with it"
        monkeypatch.delenv("AISP_LEASES")
        assert not gpu_lease.is_worker(other.pid)
        other.communicate(b"\n")


def test_the_lease_folder_ignores_tmpdir(tmp_path, monkeypatch):
    monkeypatch.delenv("AISP_LEASES", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert gpu_lease.lease_folder() == Path(f"/tmp/pytest-aisp-{os.getuid()}")
    monkeypatch.setenv("AISP_LEASES", str(tmp_path / "shared"))
    assert gpu_lease.lease_folder() == tmp_path / "shared"
    assert gpu_lease.lease_folder().is_dir()
