"""The CPU's load: which waits for a core other processes cause, and how they affect a block."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest

from pytest_aisp.isolation.interference import Cause, Disturbed, agreed_cause
from pytest_aisp.timing import schedule
from pytest_aisp.timing.cpu_timer import CpuPairTimer
from pytest_aisp.timing.fake_device import Noise, Process
from pytest_aisp.util import cpu_load, device
from pytest_aisp.util.cpu_load import CpuLoad, CpuReading

CORES = 2


@pytest.fixture
def load(monkeypatch):
    """Return a `CpuLoad` with made-up readings: (waited, own, busy, stolen) per second."""

    def make(*rates):
        at = CpuReading(0.0, 0.0, 0.0, 0.0, 0.0)
        readings = [at]
        for waited, own, busy, stolen in rates:
            total = None if busy is None else (at.busy or 0.0) + busy
            at = CpuReading(at.at + 1, at.waited + waited, at.own + own, total, at.stolen + stolen)
            readings.append(at)
        given = iter(readings)
        monkeypatch.setattr(cpu_load, "read_cpu", lambda: next(given))
        monkeypatch.setattr(device, "cores_here", lambda: range(CORES))
        monkeypatch.setattr(os, "getloadavg", lambda: (5.1, 4.0, 3.0))
        return CpuLoad()

    return make


def test_a_block_that_waited_for_a_core_is_measured_again(load):
    busy = load((0.4, 0.6, 2.0, 0.0), (0.0, 0.9, 1.0, 0.0))
    timer = CpuPairTimer.__new__(CpuPairTimer)
    timer._load, timer._monitor = busy, SimpleNamespace(look=lambda: None, begin=lambda: None)
    assert timer.disturbance() == Cause(
        "this process waited for a core 40% of the time; load 5.1 on 2 cores"
    )
    assert timer.disturbance() is None


@pytest.mark.parametrize(
    ("rates", "disturbed"),
    [
        ((0.02, 1.0, 2.0, 0.0), False),  # a wait of 2 % disturbs nothing
        ((6.0, 1.95, 2.0, 0.0), False),  # eight threads on two cores wait for each other
        ((0.4, 0.6, None, 0.0), True),  # the system hides the other processes
        ((0.3, 0.7, 0.77, 0.0), False),  # 7 % of a core for others explains no wait
        ((0.08, 0.7, 0.77, 0.0), True),  # but a wait of 8 %
    ],
)
def test_only_other_processes_make_a_wait_a_disturbance(load, rates, disturbed):
    assert (load(rates).look() is not None) == disturbed


def test_time_that_the_host_took_is_reported(load):
    watched = load((0.0, 0.8, 0.88, 0.12), (0.0, 1.0, 1.0, 0.01))
    assert watched.look() == "the host took 12% of the CPU time (steal)"
    assert watched.look() is None


def test_a_competitor_on_this_machine_is_counted_and_a_child_is_not(monkeypatch):
    """Uses real counters. They only grow, and a child's CPU time counts as this process's own."""
    before = cpu_load.read_cpu()
    spin = "import time; t = time.process_time()\nwhile time.process_time() < t + 0.3: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    after = cpu_load.read_cpu()
    assert after.own - before.own >= 0.29
    assert after.busy - before.busy >= 0.2
    assert after.waited >= before.waited
    child = subprocess.Popen([sys.executable, "-c", spin + "\ninput()"], stdin=subprocess.PIPE)
    try:
        while cpu_load.read_cpu().own - after.own < 0.25:
            assert child.poll() is None
    finally:
        child.communicate(b"\n")


def test_the_waits_of_a_thread_that_has_ended_still_count(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_load, "_waited_ns", {})
    ended, running = tmp_path / "1", tmp_path / "2"
    ended.write_text("7 3000000000 1")
    running.write_text("7 1000000000 1")
    monkeypatch.setattr(cpu_load.glob, "glob", lambda pattern: [*map(str, tmp_path.iterdir())])
    assert cpu_load._waited() == pytest.approx(4.0)
    ended.unlink()
    running.write_text("7 2000000000 1")
    assert cpu_load._waited() == pytest.approx(5.0)


def test_without_proc_nothing_is_known(monkeypatch):
    def missing(*args):
        raise OSError

    monkeypatch.setattr("builtins.open", missing)
    assert cpu_load._all_processes() == (None, 0.0)
    assert cpu_load._waited() == 0.0
    monkeypatch.setattr(os, "getloadavg", missing)
    assert cpu_load.load_text() == ""


def test_a_side_that_disturbs_itself_is_not_excused_by_a_busy_machine():
    own, paging = Cause("an import", machine=False), Cause("8 pages read from disk")
    assert agreed_cause(own, "a busy machine") == own
    assert agreed_cause(paging, "a busy machine") == Cause("a busy machine")
    assert agreed_cause(paging, None) == paging
    assert agreed_cause(None, None) is None


def test_long_disturbed_blocks_are_not_repeated_twenty_times(monkeypatch):
    clock = iter(range(0, 10**6, 4))
    monkeypatch.setattr(schedule.time, "perf_counter", lambda: next(clock))
    with pytest.raises(Disturbed, match=r"^3 blocks were disturbed: thermal slowdown"):
        Process((1e-5, 1e-5), Noise(throttle=1.0), random.Random(5)).measure(schedule.Budget())


def test_an_infinite_share_switches_the_check_off(load, monkeypatch):
    monkeypatch.setattr(cpu_load, "STOLEN", math.inf)
    assert load((0.9, 0.1, 2.0, 1.0)).look() is None
