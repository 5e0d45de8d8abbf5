"""`aisp machine peak`: its worker process, the locks it holds, and what it stores."""

from __future__ import annotations

import json

import pytest

from pytest_aisp.cli import app
from pytest_aisp.results.messages import Reply
from pytest_aisp.timing import peaks
from pytest_aisp.timing.peaks import Peaks
from pytest_aisp.tools import roofline
from pytest_aisp.util import gpu_lease
from pytest_aisp.util.device import Machine

H200 = Machine("sm90", "nvidia-h200", "NVIDIA H200", ("GPU-a", "GPU-b"))
RATES = {"copy": 4.239e12, "bf16": 7.714e14, "launch": 7.118e-6}
FACTS = {"name": "NVIDIA H200", "copy": "neg", "throttled": "no"}


class Worker:
    """A worker process that always answers `reply`."""

    reply = Reply(result={"rates": RATES, "facts": FACTS})

    def __init__(self, environment):
        Worker.log.append(environment)

    def ask(self, task, seconds, progress):
        Worker.log.append((task.kind, task.device))
        return self.reply

    def close(self):
        Worker.log.append("closed")


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: H200))
    monkeypatch.setattr(roofline, "WorkerProcess", Worker)
    monkeypatch.setattr(gpu_lease, "lease_folder", lambda: tmp_path)
    monkeypatch.setattr(Worker, "log", [], raising=False)
    return lambda reply: monkeypatch.setattr(Worker, "reply", reply)


def test_one_gpu_is_leased_and_measured_in_its_own_process(tmp_path, capsys):
    assert app.main(["peak"]) == 0
    environment = {"CUDA_VISIBLE_DEVICES": "GPU-a", "TRITON_INTERPRET": None}
    assert Worker.log == [environment, ("peaks", "cuda"), "closed"]
    assert {p.name for p in tmp_path.glob("*.lock")} == {"host.lock", "GPU-a.lock"}
    assert capsys.readouterr().out.splitlines() == [
        "nvidia-h200: NVIDIA H200",
        "copy    4.239 TB/s     neg",
        "bf16    771.4 TFLOP/s",
        "launch  7.118 us",
    ]


LEVELS = [
    {"name": "L1", "working_set": 16384, "bandwidth": 3.1e13, "latency": 2.1e-8},
    {"name": "DRAM", "working_set": 400 << 20, "bandwidth": 4.5e12, "latency": 6.4e-7},
]


def test_the_hierarchy_is_a_table_beside_the_data_sheet(machine, tmp_path, capsys):
    machine(Reply(result={"levels": LEVELS, "near": 220.0, "far": 290.0}))
    peaks.save(tmp_path / "nvidia-h200/peaks.json", Peaks("nvidia-h200", {"h2d": 5.5e10}, {}))
    assert app.main(["peak", "--hierarchy", f"--baselines={tmp_path}"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "level         working set  bandwidth  latency  data sheet",
        "L1            16.0 KiB     31 TB/s    21 ns    -",
        "DRAM          400 MiB      4.5 TB/s   640 ns   94% of 4.8 TB/s",
        "h2d (stored)  -            55 GB/s    -        86% of 64 GB/s",
        "a load from the L2 takes 220 cycles in the fastest tenth of the lines, 290 in the slowest",
    ]


def test_the_hierarchy_is_measured_on_a_gpu_and_stores_nothing(monkeypatch, capsys):
    assert app.main(["peak", "--hierarchy", "--store"]) == 2
    assert "--hierarchy stores nothing: leave out --store" in capsys.readouterr().err
    cpu = Machine("cpu", "cpu-1", "a CPU")
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: cpu))
    assert app.main(["peak", "--hierarchy"]) == 2
    assert "measured on a GPU, and there is none here" in capsys.readouterr().err


def test_a_cpu_is_measured_alone(monkeypatch, tmp_path):
    laptop = Machine("cpu", "cpu-some-4c", "Some, 4 cores")
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: laptop))
    assert app.main(["peak", "--json"]) == 0
    assert Worker.log[0] == {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    assert Worker.log[1] == ("peaks", "cpu")
    assert {p.name for p in tmp_path.glob("*.lock")} == {"host.lock"}


def test_json_holds_rates_and_facts(capsys):
    assert app.main(["peak", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "product": "nvidia-h200",
        "rates": RATES,
        "facts": FACTS,
    }


def stored_peaks(folder, rates, facts):
    path = folder / "kept" / "nvidia-h200" / "peaks.json"
    path.parent.mkdir(parents=True)
    peaks.save(path, Peaks("nvidia-h200", rates, facts))
    return path


def test_store_replaces_all_rates_of_other_versions_and_prints_the_old_ones(tmp_path, capsys):
    path = stored_peaks(tmp_path, {"copy": 5e12, "fp8": 1e15}, {"no": "more", "driver": "570"})
    assert app.main(["peak", "--store", f"--baselines={tmp_path / 'kept'}"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        f"stored in {path}: copy 5 TB/s -> 4.239 TB/s",
        f"stored in {path}: bf16 771.4 TFLOP/s",
        f"stored in {path}: launch 7.118 us",
    ]
    assert peaks.load(path) == Peaks("nvidia-h200", RATES, FACTS)


def test_store_keeps_better_rates_of_the_same_versions(tmp_path, capsys):
    before = {"copy": 4e12, "bf16": 8e14, "fp8": 1e15, "launch": 7e-6}
    path = stored_peaks(tmp_path, before, {"copy": "old", "bf16": "a @ b.T"})
    assert app.main(["peak", "--store", f"--baselines={tmp_path / 'kept'}"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        f"stored in {path}: copy 4 TB/s -> 4.239 TB/s",
        f"kept in {path}: bf16 800 TFLOP/s, now 771.4 TFLOP/s",
        f"kept in {path}: fp8 1000 TFLOP/s, now not measured",
        f"kept in {path}: launch 7 us, now 7.118 us",
    ]
    best = {**before, "copy": RATES["copy"]}
    assert peaks.load(path) == Peaks("nvidia-h200", best, {**FACTS, "bf16": "a @ b.T"})


def test_peaks_of_a_throttled_gpu_are_not_stored(machine, tmp_path, capsys):
    facts = {**FACTS, "throttled": "power brake"}
    machine(Reply(result={"rates": RATES, "facts": facts}))
    assert app.main(["peak", "--store", f"--baselines={tmp_path}"]) == 1
    output = capsys.readouterr()
    assert output.out.splitlines()[-2:] == [
        "the GPU was slower than it should be: power brake",
        "    aisp machine doctor",
    ]
    assert output.err == "nothing is stored: power brake\n    aisp machine doctor\n"
    assert not (tmp_path / "nvidia-h200").exists()


def test_a_failed_measurement_prints_its_reason(machine, capsys):
    machine(Reply(error="memory", message="out of memory", trace="its last words"))
    assert app.main(["peak"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "its last words",
        "the peaks of nvidia-h200 could not be measured: out of memory",
        "Find out what is wrong with the machine:",
        "    aisp machine doctor",
    ]
    assert Worker.log[-1] == "closed"


def test_a_foreign_file_and_ci_prevent_storing(tmp_path, monkeypatch, capsys):
    path = tmp_path / "nvidia-h200" / "peaks.json"
    path.parent.mkdir()
    path.write_text("mine")
    assert app.main(["peak", "--store", f"--baselines={tmp_path}"]) == 2
    assert "nothing is stored: " + str(path) + " is not a peaks file" in capsys.readouterr().err
    assert path.read_text() == "mine"
    monkeypatch.setenv("CI", "1")
    monkeypatch.setattr(Worker, "log", [])
    assert app.main(["peak", "--store"]) == 2
    assert Worker.log == []
    assert capsys.readouterr().err.startswith("--store is refused if CI is set")
