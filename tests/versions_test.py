"""The library versions that are recorded with a result."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from pytest_aisp.results.messages import FactsTask
from pytest_aisp.util import device
from pytest_aisp.worker.engine import Engine


def test_a_worker_process_returns_every_compared_version():
    facts = Engine().facts(FactsTask())
    assert set(device.VERSIONS) <= set(facts)
    assert facts["torch"] == torch.__version__


@pytest.mark.skipif(torch.version.cuda is not None, reason="about a torch without CUDA")
def test_libraries_that_torch_was_built_without_have_no_version():
    found = device.versions()
    assert {found[name] for name in ("cudnn", "cublas", "nccl")} == {None}


def test_versions_come_from_the_libraries(monkeypatch):
    parts = {0: 13, 1: 1, 2: 4}
    opened = []

    def load(name, mode):
        opened.append(name)

        def get_property(part, value):
            value._obj.value = parts[part]
            return 0

        return SimpleNamespace(cublasGetProperty=get_property)

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 7))
    found = device.versions()
    assert opened == ["libcublas.so.13"]
    assert (found["cudnn"], found["cublas"], found["nccl"]) == ("91002", "13.1.4", "2.27.7")


@pytest.mark.parametrize("status", [0, 1])
def test_a_cublas_that_is_not_loaded_or_gives_no_answer_is_unknown(monkeypatch, status):
    def load(name, mode):
        if not status:
            raise OSError("not loaded")
        return SimpleNamespace(cublasGetProperty=lambda part, value: status)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert device._cublas_version("13.0") is None


def test_a_cudnn_with_another_version_than_torchs_is_unknown(monkeypatch):
    def refused():
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", refused)
    assert device.versions()["cudnn"] is None
