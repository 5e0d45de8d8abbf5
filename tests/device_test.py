"""What NVML says while a GPU is measured, on a GPU that is only told of."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from pytest_aisp import device
from pytest_aisp.device import Telemetry

STRANGER = 1  # init: never a bench process


class Nvml:
    """An NVML that answers what it is given."""

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
        monkeypatch.setattr(device, "_nvml", lambda: Nvml(**answers))
        return Telemetry(0)

    return make


def test_a_quiet_gpu_is_not_disturbed(telemetry):
    assert telemetry().look() is None


@pytest.mark.parametrize(("bit", "name"), device.THROTTLED.items())
def test_throttling_is_named(telemetry, bit, name):
    assert telemetry(reasons=bit).look() == name


def test_the_power_cap_is_normal(telemetry):
    assert telemetry(reasons=0x4).look() is None


def test_another_process_that_computes_is_named(telemetry):
    assert telemetry(busy=[STRANGER]).look() == f"process {STRANGER} computes on this GPU too"


def test_we_are_no_stranger_and_nobody_is_where_ids_are_hidden(telemetry, monkeypatch):
    assert telemetry(busy=[STRANGER], known=[STRANGER]).look() is None
    monkeypatch.setattr(device, "_is_bench", lambda pid: pid == os.getpid())
    assert telemetry(busy=[os.getpid()]).look() is None


def test_it_is_asked_at_some_blocks_and_at_each_while_disturbed(telemetry):
    watched = telemetry(reasons=0x8)
    said = [watched.disturbance() for _ in range(Telemetry.EVERY + 2)]
    assert said == [None] * (Telemetry.EVERY - 1) + ["hardware slowdown"] * 3


def test_a_bench_process_is_known_by_its_command():
    assert not device._is_bench(os.getpid())
    assert not device._is_bench(2**30)
