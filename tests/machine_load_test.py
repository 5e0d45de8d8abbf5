"""`aisp machine doctor` measures other use of the machine before it reports no problems."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from doctor_test import Nvml

from pytest_aisp.timing import neighbors
from pytest_aisp.timing.neighbors import Slices
from pytest_aisp.tools import doctor, host_findings
from pytest_aisp.util.cpu_load import CpuReading

QUIET = CpuReading(0.0, 0.0, 1.0, 10.0, 0.0)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(host_findings.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(host_findings, "load_text", lambda: "; load 5.1 on 2 cores")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def cpu(own, busy, stolen=0.0):
    """Return the findings after two seconds on two cores."""
    after = CpuReading(2.0, 0.0, 1.0 + own, busy and 10.0 + busy, stolen)
    return [(f.name, f.state, f.text) for f in host_findings.cpu_findings(QUIET, after, 2)]


FREE = ("steal", "fine", "the host takes 0% of the CPU time")


@pytest.mark.parametrize(
    ("own", "busy", "state", "cores"),
    [(2.0, 2.15, "fine", "0.1"), (0.0, 1.0, "note", "0.5"), (0.2, 3.6, "harms", "1.7")],
)
def test_other_processes_on_the_cores_are_measured(own, busy, state, cores):
    text = f"other processes use {cores} of 2 cores; load 5.1 on 2 cores"
    assert cpu(own, busy) == [("CPU", state, text), FREE]


def test_time_that_the_host_takes_harms():
    assert cpu(0, 0.1, 0.48)[1] == ("steal", "harms", "the host takes 12% of the CPU time")


def test_hidden_processes_are_unread():
    text = "the system hides other processes; load 5.1 on 2 cores"
    assert cpu(0, None) == [("CPU", "unread", text)]


@pytest.fixture
def gpu(monkeypatch):
    """Return the findings about a GPU with this utilization, and these time slices of others."""

    def findings(percent, lost=0.0, total=5e-3, reader=True):
        chain = Slices(lost, lost, total) if total else None

        class Reader:
            cache_clear = staticmethod(lambda: None)

            def __call__(self):
                return (lambda: chain) if reader else None

        monkeypatch.setattr(neighbors, "slice_reader", Reader())
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
        rates = None if percent is None else SimpleNamespace(gpu=percent)
        nvml = Nvml(nvmlDeviceGetUtilizationRates=rates)
        found = list(host_findings.load_findings(nvml, (0, 1)))
        return [(f.name, f.state, f.text) for f in found if f.name.startswith("GPU")]

    return findings


def test_a_quiet_gpu_is_fine(gpu):
    assert gpu(0) == [
        ("GPU 0 utilization", "fine", "0 % in 1 s"),
        ("GPU 0 time slices", "fine", "none in 250 ms"),
    ]


def test_a_used_gpu_harms(gpu):
    text = "another process uses 40% of this GPU in time slices of up to 2 ms"
    assert gpu(34, lost=2e-3) == [
        ("GPU 0 utilization", "harms", "another process uses 34 % of this GPU"),
        ("GPU 0 time slices", "harms", text),
    ]


def test_what_cannot_be_measured_is_unread(gpu, monkeypatch):
    silent, slow = gpu(None, total=0.0)
    assert silent == ("GPU 0 utilization", "unread", "NVML gives no answer")
    assert slow[1:] == ("unread", "the CPU is too busy to queue kernels without a pause")
    assert gpu(0, reader=False)[1][1:] == ("unread", "this machine cannot compile CUDA C++")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = host_findings.time_slices("GPU 0", 0)
    assert (found.state, found.text) == ("unread", "torch cannot use this GPU")


def test_the_doctor_measures(monkeypatch):
    monkeypatch.setattr(doctor.device, "load_nvml", lambda: None)
    assert {"CPU"} <= {finding.name for finding in doctor.examine()}
