"""`aisp machine doctor`: the findings on fake machines."""

from __future__ import annotations

import json
import os
import re
import resource
from types import SimpleNamespace

import pytest

from pytest_aisp.cli import app
from pytest_aisp.tools import doctor
from pytest_aisp.tools.doctor import Finding
from pytest_aisp.util import device

MIB = 1 << 20
ANSWERS = {
    "nvmlDeviceGetIndex": 0,
    "nvmlDeviceGetUUID": "GPU-0",
    "nvmlDeviceGetName": "NVIDIA H200",
    "nvmlDeviceGetClockInfo": 345,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetCurrentClocksEventReasons": 0,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
    "nvmlDeviceGetPersistenceMode": 1,
    "nvmlDeviceGetEccMode": [1, 1],
    "nvmlDeviceGetMigMode": [0, 0],
    "nvmlDeviceGetComputeMode": 0,
    "nvmlDeviceGetComputeRunningProcesses": [],
    "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:18:00.0\0"),
}


class Nvml:
    """An NVML of one GPU, which refuses every function without an answer."""

    def __init__(self, **answers):
        for name, answer in {**ANSWERS, **answers}.items():
            if answer is not None:
                setattr(self, name, lambda *args, answer=answer: answer)

    def nvmlDeviceGetCount(self):
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return "handle"

    def nvmlSystemGetDriverVersion(self):
        return "580.159.04"


@pytest.fixture
def root(tmp_path):
    """The files of a machine without problems."""
    files = {
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
        "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "performance\n",
        "sys/bus/pci/devices/0000:18:00.0/numa_node": "1\n",
        "sys/devices/system/node/node1/cpulist": "1,4-7\n",
        "proc/driver/nvidia/params": "RmProfilingAdminOnly: 0\n",
        "dev/shm/x": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture(autouse=True)
def every_gpu_is_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def gpu(root, cores=(0, 1), **answers):
    found = doctor.gpu_findings(Nvml(**answers), root, cores)
    return {finding.name: finding for finding in found}


def host(root, limits=(resource.RLIM_INFINITY,) * 2, versions=lambda name: "1.2", cores=(0, 1)):
    limit = limits if callable(limits) else lambda number: limits
    found = doctor.host_findings(root, limit=limit, installed=versions, cores=cores)
    return {finding.name: finding for finding in found}


def test_a_machine_without_problems(root):
    found = {**gpu(root), **host(root)}
    assert {f.state for name, f in found.items() if name != "/dev/shm"} == {"fine"}
    assert found["driver"].text == "580.159.04"
    assert found["GPU 0 clocks"].text == "SM at 345 MHz now, 1980 at most"
    assert found["GPU 0 NUMA"].text == "node 1, CPUs 1,4-7"
    assert found["huge pages"].text == "transparent: madvise"
    assert [found[n].text for n in ("torch", "triton", "cuda-core", "NVRTC", "NCCL")] == ["1.2"] * 5


@pytest.mark.parametrize(
    ("answers", "name", "state", "text", "change"),
    [
        (
            {"nvmlDeviceGetCurrentClocksEventReasons": 0x2},
            *("clocks", "note", "SM at 345 MHz now, 1980 at most, limited by a user setting"),
            "unless you want this: sudo nvidia-smi -rgc && sudo nvidia-smi -rac",
        ),
        (
            {"nvmlDeviceGetCurrentClocksEventReasons": 0x40},
            *("throttling", "harms", "hardware thermal slowdown"),
            "check cooling and power: nvidia-smi -q -d PERFORMANCE",
        ),
        (
            {"nvmlDeviceGetEnforcedPowerLimit": 500_000},
            *("power", "note", "limit 500 W, default 700 W"),
            "unless you want this: sudo nvidia-smi -pl 700",
        ),
        (
            {"nvmlDeviceGetPersistenceMode": 0},
            *("persistence", "note", "off: the driver unloads between processes, and each one "),
            "sudo nvidia-smi -pm 1",
        ),
        (
            {"nvmlDeviceGetEccMode": [1, 0]},
            *("ECC", "note", "on, but off after the next reset: times before and after "),
            "record the results again after the reset",
        ),
        (
            {"nvmlDeviceGetMigMode": [1, 1]},
            *("MIG", "note", "on: slices share the memory"),
            "measure on a GPU without MIG",
        ),
        (
            {"nvmlDeviceGetComputeMode": 3},
            *("compute mode", "harms", "exclusive: a remeasurement's process cannot start beside "),
            "sudo nvidia-smi -c 0",
        ),
        (
            {"nvmlDeviceGetComputeMode": 2},
            *("compute mode", "harms", "prohibited: no process may compute here"),
            "sudo nvidia-smi -c 0",
        ),
        (
            {"nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=1)]},
            *("processes", "harms", "other processes use this GPU: 1"),
            "wait for them, or use another GPU",
        ),
    ],
)
def test_a_problem_of_the_gpu_says_what_to_change(root, answers, name, state, text, change):
    found = gpu(root, **answers)[f"GPU 0 {name}"]
    assert (found.state, found.change) == (state, change)
    assert found.text.startswith(text)


def test_worker_processes_of_aisp_are_not_other_processes(root, monkeypatch):
    monkeypatch.setattr(device, "is_worker", lambda pid: pid == 7)
    ours = [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=7)]
    found = gpu(root, nvmlDeviceGetComputeRunningProcesses=ours)["GPU 0 processes"]
    assert (found.state, found.text) == ("fine", "no other process uses this GPU")


def test_an_nvml_function_without_an_answer_is_unread(root):
    silent = [name for name in ANSWERS if name[13:] not in ("Index", "UUID", "Name")]
    found = gpu(root, **dict.fromkeys(silent))
    unread = {name for name, f in found.items() if f.state == "unread"}
    assert unread == {
        *(f"GPU 0 {what}" for what in ("clocks", "throttling", "power", "persistence", "ECC")),
        *(f"GPU 0 {what}" for what in ("compute mode", "processes", "NUMA")),
    }
    assert found["GPU 0 MIG"].text == "this GPU has none"


def test_cpus_of_another_numa_node_harm(root):
    found = gpu(root, cores=(0, 2, 3))["GPU 0 NUMA"]
    assert found.state == "harms"
    assert found.text == "node 1, CPUs 1,4-7; this process may use none of them"
    assert found.change == "numactl --cpunodebind=1 --membind=1 pytest ..."
    (root / "sys/bus/pci/devices/0000:18:00.0/numa_node").write_text("-1\n")
    assert gpu(root)["GPU 0 NUMA"].state == "unread"


def test_cpu_lists_are_parsed():
    assert doctor.cpus_of("0-2,8,10-11") == {0, 1, 2, 8, 10, 11}
    assert doctor.cpus_of("") == set()


def test_counters_may_be_restricted_to_administrators(root):
    params = root / "proc/driver/nvidia/params"
    params.write_text("RmProfilingAdminOnly: 1\n")
    assert doctor.counters(root, admin=True).state == "fine"
    found = doctor.counters(root, admin=False)
    assert found.state == "note"
    assert found.text.startswith("ncu may not read the GPU's performance counters")
    assert "NVreg_RestrictProfilingToAdminUsers=0" in found.change
    params.unlink()
    assert doctor.counters(root).state == "unread"


def test_low_limits_say_how_to_raise_them(root):
    found = host(root, lambda number: (1024, resource.RLIM_INFINITY))
    assert found["nofile"].text.startswith(
        "ulimit: 1024, less than 4096: ranks and loader workers open files"
    )
    changes = [found[name].change for name in ("memlock", "nofile", "stack")]
    assert changes == ["ulimit -l 65536", "ulimit -n 4096", "ulimit -s 8192"]
    hard = host(root, (MIB, MIB))["memlock"]
    assert hard.text.startswith("ulimit: 1 MiB, less than 64 MiB: ")
    assert hard.change == "raise the hard limit of memlock in limits.conf"


def test_a_cpu_governor_other_than_performance_harms(root):
    file = root / "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor"
    file.write_text("powersave\n")
    found = host(root)["governor"]
    assert (found.state, found.text.partition(":")[0]) == ("harms", "performance, powersave")
    assert found.change == "sudo cpupower frequency-set -g performance"
    assert host(root, cores=(7,))["governor"].state == "unread"


def test_disabled_huge_pages_are_noted(root):
    file = root / "sys/kernel/mm/transparent_hugepage/enabled"
    file.write_text("always madvise [never]\n")
    found = host(root)["huge pages"]
    assert (found.state, found.change) == ("note", f"echo madvise | sudo tee {file}")
    file.unlink()
    assert host(root)["huge pages"].state == "unread"


@pytest.mark.parametrize(
    ("blocks", "state", "text"),
    [
        (16384, "harms", "64 MiB, less than 1 GiB: ranks and loader workers share memory there"),
        (131072, "note", "512 MiB, less than 1 GiB: ranks and loader workers share memory there"),
        (262144, "fine", "1 GiB"),
    ],
)
def test_small_shared_memory_says_how_to_enlarge_it(root, monkeypatch, blocks, state, text):
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_frsize=4096, f_blocks=blocks))
    found = host(root)["/dev/shm"]
    assert (found.state, found.text, bool(found.change)) == (state, text, state != "fine")


def test_shared_memory_that_is_missing_is_unread(root):
    assert host(root / "nowhere")["/dev/shm"].state == "unread"


def test_a_missing_package_says_how_to_install_it(root):
    found = host(root, versions=lambda name: None)
    assert (found["triton"].state, found["triton"].change) == ("note", "pip install triton")
    assert found["NCCL"].state == "unread"
    assert doctor.version_of("no-such-distribution") is None
    assert re.match(r"\d+\.\d+", doctor.version_of("pytest"))


def test_a_harmful_finding_is_exit_code_1_with_its_change_below():
    found = [Finding("a", "harms", "bad", "do\nthis"), Finding("bcd", "fine", "good")]
    found.append(Finding("e", "unread", "silent"))
    answer = doctor.doctor_result(found, as_json=False)
    assert answer.code == 1
    assert answer.lines == [
        "HARMS  a    bad",
        "         do",
        "         this",
        "fine   bcd  good",
        "?      e    silent",
        "1 of 3 findings harm measurements; 1 could not be read",
    ]
    plain = json.loads("\n".join(doctor.doctor_result(found[1:], as_json=True).lines))
    assert plain[0] == {"name": "bcd", "state": "fine", "said": "good", "change": ""}
    assert doctor.doctor_result(found[1:2], as_json=False).lines[-1] == "nothing harms"


def test_without_a_gpu_the_host_is_examined(monkeypatch, capsys):
    monkeypatch.setattr(device, "load_nvml", lambda: None)
    code = app.main(["doctor", "--json"])
    found = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert code == any(finding["state"] == "harms" for finding in found.values())
    assert found["GPU"]["state"] == "unread"
    assert "NVML finds no GPU" in found["GPU"]["said"]
    assert found["torch"]["state"] == "fine"


def test_an_invisible_gpu_is_not_examined(root, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert list(gpu(root)) == ["GPU"]
