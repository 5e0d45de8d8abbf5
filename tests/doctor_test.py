"""`aisp machine doctor`: the findings on fake machines."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest

from pytest_aisp.cli import app
from pytest_aisp.tools import doctor, host_findings
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
        "sys/bus/pci/devices/0000:18:00.0/msi_irqs/33": "msi\n",
        "proc/irq/33/smp_affinity_list": "0-7\n",
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


@pytest.fixture
def host(root, monkeypatch):
    """Return a function that returns the findings on a host with these properties."""

    def host(limits=None, version="1.2", cores=(0, 1), shm=1024):
        unlimited = (resource.RLIM_INFINITY,) * 2
        status = SimpleNamespace(f_frsize=4096, f_blocks=shm * MIB // 4096)
        monkeypatch.setattr(resource, "getrlimit", lambda n: (limits or {}).get(n, unlimited))
        monkeypatch.setattr(host_findings, "version_of", lambda name: version)
        monkeypatch.setattr(os, "statvfs", lambda folder: status)
        return {finding.name: finding for finding in host_findings.host_findings(root, cores)}

    return host


def test_a_machine_without_problems(root, host):
    found = {**gpu(root), **host()}
    assert {f.state for f in found.values()} == {"fine"}
    assert found["driver"].text == "580.159.04"
    assert found["GPU 0 clocks"].text == "SM at 345 MHz now, 1980 at most"
    assert found["GPU 0 NUMA"].text == "node 1, CPUs 1,4-7"
    assert found["huge pages"].text == "transparent: madvise"
    assert [found[n].text for n in ("torch", "triton", "cuda-core", "NVRTC", "NCCL")] == ["1.2"] * 5


PROBLEMS = """
note GPU 0 clocks: SM at 345 MHz now, 1980 at most, limited by a user setting
    unless you want this: sudo nvidia-smi -rgc && sudo nvidia-smi -rac
harms GPU 0 throttling: hardware thermal slowdown
    check cooling and power: nvidia-smi -q -d PERFORMANCE
note GPU 0 power: limit 500 W, default 700 W
    unless you want this: sudo nvidia-smi -pl 700
note GPU 0 persistence: off: the driver unloads between processes, and each one loads it again
    sudo nvidia-smi -pm 1
note GPU 0 ECC: on, but off after the next reset: times before and after will differ
    record the results again after the reset
note GPU 0 MIG: on: slices share the memory, and their times are not those of a whole GPU
    measure on a GPU without MIG
harms GPU 0 compute mode: exclusive: no second process can start for a remeasurement
    sudo nvidia-smi -c 0
harms GPU 0 processes: other processes use this GPU: 1
    wait for them, or use another GPU
harms GPU 0 NUMA: node 1, CPUs 1,4-7; this process may use none of them
    numactl --cpunodebind=1 --membind=1 pytest ...
note GPU 0 interrupts: 1 of 1 go only to CPUs of another node
    echo 1,4-7 | sudo tee ROOT/proc/irq/33/smp_affinity_list
note torch: not installed
    pip install torch
note triton: not installed
    pip install triton
note cuda-core: not installed
    pip install cuda-core
note NVRTC: not installed
    pip install nvidia-cuda-nvrtc
unread NCCL: not installed as a package
    $
note memlock: ulimit: 1 MiB, less than 64 MiB: network adapters pin memory
    raise the hard limit of memlock in limits.conf
note nofile: ulimit: 1024, less than 4096: ranks and loader workers open many files
    ulimit -n 4096
note stack: ulimit: 1 MiB, less than 8 MiB: compilers recurse deeply
    ulimit -s 8192
note huge pages: transparent: never; large buffers miss the TLB
    echo madvise | sudo tee ROOT/sys/kernel/mm/transparent_hugepage/enabled
harms governor: performance, powersave: CPU clocks change with the load, and so do times of the host
    sudo cpupower frequency-set -g performance
harms /dev/shm: 64 MiB, less than 1 GiB: ranks and loader workers share memory there
    in a container, docker run --shm-size=8g; elsewhere: sudo mount -o remount,size=8G /dev/shm
"""


def test_each_problem_says_what_to_change(root, host):
    (root / "sys/devices/system/cpu/cpu2/cpufreq").mkdir(parents=True)
    (root / "sys/devices/system/cpu/cpu2/cpufreq/scaling_governor").write_text("powersave\n")
    (root / "sys/kernel/mm/transparent_hugepage/enabled").write_text("always madvise [never]\n")
    (root / "proc/irq/33/smp_affinity_list").write_text("0,2-3\n")
    answers = {
        "nvmlDeviceGetCurrentClocksEventReasons": 0x2 | 0x40,
        "nvmlDeviceGetEnforcedPowerLimit": 500_000,
        "nvmlDeviceGetPersistenceMode": 0,
        "nvmlDeviceGetEccMode": [1, 0],
        "nvmlDeviceGetMigMode": [1, 1],
        "nvmlDeviceGetComputeMode": 3,
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=1)],
    }
    limits = {
        resource.RLIMIT_MEMLOCK: (MIB, MIB),
        resource.RLIMIT_NOFILE: (1024, resource.RLIM_INFINITY),
        resource.RLIMIT_STACK: (MIB, resource.RLIM_INFINITY),
    }
    found = [
        *gpu(root, cores=(0, 2), **answers).values(),
        *host(limits, version=None, cores=(0, 2), shm=64).values(),
    ]
    lines = [f"{f.state} {f.name}: {f.text}\n    {f.change}" for f in found if f.state != "fine"]
    assert "\n".join(lines).replace(str(root), "ROOT") == PROBLEMS.strip().replace("$", "")


def test_a_gpu_on_which_no_process_may_compute_harms(root):
    found = gpu(root, nvmlDeviceGetComputeMode=2)["GPU 0 compute mode"]
    assert (found.state, found.text) == ("harms", "prohibited: no process may compute here")


def test_a_shared_memory_of_512_mib_is_noted(host):
    assert host(shm=512)["/dev/shm"].state == "note"


def test_worker_processes_of_aisp_are_not_other_processes(root, monkeypatch):
    monkeypatch.setattr(doctor, "is_worker", lambda pid: pid == 7)
    ours = [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=7)]
    found = gpu(root, nvmlDeviceGetComputeRunningProcesses=ours)["GPU 0 processes"]
    assert (found.state, found.text) == ("fine", "no other process uses this GPU")


def test_a_machine_that_gives_no_answers_is_unread(tmp_path):
    silent = [name for name in ANSWERS if name[13:] not in ("Index", "UUID", "Name")]
    host = {finding.name: finding for finding in host_findings.host_findings(tmp_path, (0, 1))}
    found = {**gpu(tmp_path, **dict.fromkeys(silent)), **host}
    assert {name for name, f in found.items() if f.state == "unread"} - {"NCCL"} == {
        *(f"GPU 0 {what}" for what in ("clocks", "throttling", "power", "persistence", "ECC")),
        *(f"GPU 0 {what}" for what in ("compute mode", "processes", "NUMA")),
        *("counters", "huge pages", "governor", "/dev/shm"),
    }
    assert found["GPU 0 MIG"].text == "this GPU has none"


def test_an_unknown_numa_node_is_unread(root):
    (root / "sys/bus/pci/devices/0000:18:00.0/numa_node").write_text("-1\n")
    assert gpu(root)["GPU 0 NUMA"].state == "unread"


def test_cpu_lists_are_parsed():
    assert doctor.cpus_of("0-2,8,10-11") == {0, 1, 2, 8, 10, 11}
    assert doctor.cpus_of("") == set()


def test_counters_may_be_restricted_to_administrators(root, monkeypatch):
    (root / "proc/driver/nvidia/params").write_text("RmProfilingAdminOnly: 1\n")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert doctor.counters(root).state == "fine"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = doctor.counters(root)
    assert found.state == "note"
    assert found.text.startswith("ncu may not read the GPU's performance counters")
    assert "NVreg_RestrictProfilingToAdminUsers=0" in found.change


def test_versions_are_those_of_distributions():
    assert host_findings.version_of("no-such-distribution") is None
    assert re.match(r"\d+\.\d+", host_findings.version_of("pytest"))


def test_a_harmful_finding_is_exit_code_1_with_its_change_below():
    found = [Finding("a", "harms", "bad", "do\nthis"), Finding("bcd", "fine", "good")]
    found.append(Finding("e", "unread", "silent"))
    result = doctor.doctor_result(found, as_json=False)
    assert result.code == 1
    assert result.lines == [
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


SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "CUDA_MODULE_LOADING": "EAGER",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "LD_PRELOAD": "/usr/lib/libjemalloc.so.2",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
OF_A_PROCESS = """
harms CPU quota: 1.5 of 4 cores: the system stops this process whenever it has used its share
note NUMA balancing: on: the kernel moves pages while they are used
note OpenMP threads: 1 of 4 cores: operators on the CPU use no others
fine thread binding: none
fine malloc: jemalloc
note module loading: eager: each process loads all kernels of all libraries when it starts
note connections: 1 queue to the GPU: kernels of different streams may wait for each other
fine GPU allocator: expandable_segments:True
"""


def process(root, **environment):
    found = host_findings.process_findings(root, range(4), environment)
    return [f"{f.state} {f.name}: {f.text}" for f in found]


def test_settings_of_the_process_are_found(root):
    for name, text in {
        "sys/fs/cgroup/cpu.max": "150000 100000\n",
        "proc/sys/kernel/numa_balancing": "1\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert process(root, **SETTINGS) == OF_A_PROCESS.strip().splitlines()


def test_a_process_without_settings_is_fine(root):
    quota = root / "sys/fs/cgroup/cpu.max"
    assert process(root)[0] == "unread CPU quota: the system names no cgroup of version 2"
    quota.parent.mkdir(parents=True)
    for text, said in (("max 100000\n", "none, 4 cores"), ("400000 100000\n", "4 of 4 cores")):
        quota.write_text(text)
        found = process(root, MALLOC_ARENA_MAX="2")
        assert found[0] == f"fine CPU quota: {said}"
        assert {line.partition(" ")[0] for line in found} == {"fine"}
        assert found[4] == "fine malloc: glibc with at most 2 arenas"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("9", "note OpenMP threads: 9 threads on 4 cores: they wait for each other"),
        ("4", "fine OpenMP threads: 4 on 4 cores"),
        ("many", "note OpenMP threads: OMP_NUM_THREADS=many is not a number"),
    ],
)
def test_numbers_of_threads(root, value, said):
    assert process(root, OMP_NUM_THREADS=value)[2] == said


INHERITED = "after pytest imports torch, all processes that it starts use only"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OMP_PROC_BIND": "close"}, f"harms OMP_PROC_BIND=close: {INHERITED} one core"),
        ({"OMP_PLACES": "Cores(2)"}, f"harms OMP_PLACES=Cores(2): {INHERITED} one core"),
        ({"GOMP_CPU_AFFINITY": "0-3"}, f"harms GOMP_CPU_AFFINITY=0-3: {INHERITED} one core"),
        (
            {"OMP_PROC_BIND": "true", "OMP_PLACES": "sockets"},
            f"note OMP_PROC_BIND=true, OMP_PLACES=sockets: {INHERITED} the first of these places",
        ),
        ({"OMP_PROC_BIND": "FALSE", "GOMP_CPU_AFFINITY": "0-3"}, "fine none"),
        ({"OMP_PROC_BIND": ""}, "fine none"),
    ],
)
def test_binding_of_threads(variables, said):
    found = host_findings._binding(range(4), variables)
    assert f"{found.state} {found.text}" == said
    names = " ".join(name for name in host_findings.BINDING if variables.get(name))
    assert found.change == ("" if found.state == "fine" else f"unset {names}")


def test_a_process_with_one_of_several_cores_is_found(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    found = host_findings._binding([5], {})
    assert found.state == "harms"
    assert found.text == (
        "1 of 8 cores: pytest, its worker processes and the GPU's driver share it"
    )
    assert found.change.startswith("allow several cores: taskset -c 0-7 ...")
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert host_findings._binding([0], {"OMP_PROC_BIND": "true"}).state == "fine"


@pytest.mark.skipif(len(device.cores_here()) < 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("variables", "cores"),
    [({"OMP_PROC_BIND": "true"}, 1), ({"OMP_PROC_BIND": "false", "GOMP_CPU_AFFINITY": "0"}, None)],
)
def test_torch_binds_its_process_as_doctor_says(variables, cores):
    script = "import os, torch; print(len(os.sched_getaffinity(0)))"
    environment = {k: v for k, v in os.environ.items() if k not in host_findings.BINDING}
    found = subprocess.check_output([sys.executable, "-c", script], env=environment | variables)
    assert int(found) == (cores or len(os.sched_getaffinity(0)))


def test_the_fix_script_only_prints_commands(tmp_path):
    found = [
        Finding("governor", "harms", "powersave", "sudo cpupower frequency-set -g performance"),
        Finding("power", "note", "500 W", "unless you want this: sudo nvidia-smi -pl 700"),
        Finding("nofile", "note", "1024", "ulimit -n 4096"),
        Finding("ECC", "note", "on", "record the results again after the reset"),
        Finding("clocks", "fine", "1980 MHz"),
    ]
    result = doctor.fix_script(found)
    assert result.code == 0
    assert result.lines == [
        "#!/bin/sh",
        "# Read this before you run it. No command has been run.",
        "set -eu",
        "",
        "# These change one shell. Put them where you start pytest.",
        "# nofile: 1024",
        "# ulimit -n 4096",
        "",
        "# governor: powersave",
        "sudo cpupower frequency-set -g performance",
        "# power: 500 W",
        "sudo nvidia-smi -pl 700",
        "",
        "# These have no command.",
        "# ECC: on",
        "#   record the results again after the reset",
    ]
    script = tmp_path / "fix.sh"
    script.write_text("\n".join(result.lines))
    assert subprocess.run(["sh", "-n", script], check=False).returncode == 0
    assert doctor.fix_script(found[-1:]).lines[-1] == "# Nothing to change."


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
