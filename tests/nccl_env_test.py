"""`aisp links nccl-env` explains the variables that are set and changes none."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from pytest_aisp.cli import app
from pytest_aisp.distributed import nccl
from pytest_aisp.worker.client import worker_environment

RESPECTED = "(respected: the ranks get it unchanged)"


def lines(environment):
    return list(nccl.nccl_env_result(environment, "NCCL 2.28.9, in torch 2.11.0").lines)


def test_set_variables_are_shown_with_their_meaning():
    shown = lines({"NCCL_DEBUG": "INFO", "TORCH_NCCL_BLOCKING_WAIT": "1", "HOME": "/root"})
    assert shown[:5] == [
        "NCCL 2.28.9, in torch 2.11.0",
        "",
        "set here",
        "NCCL_DEBUG=INFO             what NCCL prints: VERSION, WARN, INFO or TRACE",
        "TORCH_NCCL_BLOCKING_WAIT=1  1: wait() blocks the host and raises when it times out",
    ]
    assert not any("HOME" in line for line in shown)


def test_no_variable_set():
    assert lines({})[2] == ("none of NCCL_, TORCH_NCCL_, TORCH_SYMM_MEM_, NVSHMEM_* is set here")


def test_an_unknown_variable_is_shown_too():
    assert "NCCL_NEW=x  not in this table: see the library's documentation" in lines(
        {"NCCL_NEW": "x"}
    )


@pytest.mark.parametrize(("name", "value"), nccl.MULTICAST_OFF.items())
def test_variables_that_turn_multicast_off_reach_the_ranks(name, value, monkeypatch):
    (shown,) = [line for line in lines({name: value}) if line.startswith(f"{name}=")]
    assert shown.endswith(RESPECTED)
    assert nccl.MEANINGS[name] in shown
    other = {"0": "1", "1": "0"}[value]
    assert RESPECTED not in "\n".join(lines({name: other}))
    monkeypatch.setenv(name, value)
    assert worker_environment({"CUDA_VISIBLE_DEVICES": ""})[name] == value  # as ranks are started


def test_advice_for_several_nodes_shows_current_values():
    shown = lines({"MASTER_ADDR": "10.0.0.1"})
    assert "for several nodes (advice; nothing was set)" in shown
    (address,) = [line for line in shown if line.startswith("MASTER_ADDR")]
    assert "is 10.0.0.1" in address
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "MASTER_PORT"):
        assert any(line.startswith(name) and "not set" in line for line in shown)
    assert any(line.startswith("interfaces here: ") and "lo" in line for line in shown)


def test_adapters_come_from_sysfs(monkeypatch, tmp_path):
    monkeypatch.setattr(nccl, "INFINIBAND", tmp_path / "none")
    assert lines({})[-1] == "InfiniBand or RoCE adapters here: none"
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(nccl, "INFINIBAND", tmp_path)
    assert lines({})[-1] == "InfiniBand or RoCE adapters here: mlx5_0, mlx5_1"


def test_every_known_variable_has_a_known_prefix():
    assert all(name.startswith(nccl.PREFIXES) for name in nccl.MEANINGS)
    assert set(nccl.MULTICAST_OFF) <= set(nccl.MEANINGS)


def test_the_command_changes_no_variable(monkeypatch, capsys):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    before = dict(os.environ)
    assert app.main(["nccl-env"]) == 0
    assert dict(os.environ) == before
    output = capsys.readouterr().out
    assert output.startswith(nccl.nccl_version())
    assert "NCCL_NVLS_ENABLE=0" in output


def test_version_of_nccl_in_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    without = f"torch {torch.__version__} has no NCCL: it was built without CUDA"
    assert nccl.nccl_version() == without
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 28, 9)))
    assert nccl.nccl_version() == f"NCCL 2.28.9, in torch {torch.__version__}"
