"""Remarks about a baseline that waits, or that hardly uses the machine."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from pytest_aisp.checking.inputs import BoundSide
from pytest_aisp.results.notes import cpu_note, unused_limit
from pytest_aisp.timing import peaks
from pytest_aisp.timing.cpu_timer import HostWindow, UnseenWindow, cpu_shares
from pytest_aisp.worker.process_timer import time_here

NAMES = ("added", "doubled")
WAITS = (
    "added computes for 3% of its time and waits for the rest, doubled computes for 98%:"
    " look for a sleep, a lock, a file or another process"
)


def test_a_baseline_that_waits_while_the_other_side_computes_is_remarked():
    assert cpu_note(NAMES, [0.03, 0.98]) == (WAITS, True)


@pytest.mark.parametrize(
    "shares",
    [
        (0.99, 1.0),
        (0.97, 7.9),  # the optimized side has eight threads
        (7.9, 0.98),
        (0.04, 0.05),  # both sides wait, for a file or for child processes
        (0.3, 0.5),  # other processes take both sides' core
        (1.0, 0.03),  # only the optimized side waits: no remark about the baseline
    ],
)
def test_an_honest_share_is_a_note(shares):
    text, waits = cpu_note(NAMES, shares)
    assert text == f"CPU time over wall time: {shares[0]:.2f} / {shares[1]:.2f}"
    assert not waits


def sleeping(x):
    time.sleep(0.02)
    return x


def host_window(side):
    return HostWindow(side, 2, device="cpu")


def unseen_window(side):
    nothing = SimpleNamespace(**dict.fromkeys(["draw", "write", "keep"], lambda *args: None))
    return UnseenWindow(side, 2, 0, nothing)


@pytest.mark.parametrize("made", [host_window, unseen_window])
def test_the_share_of_a_side_that_sleeps_is_near_0(made):
    window = made(BoundSide(sleeping, [(torch.ones(1),)]))
    window()
    window()
    assert window.wall > 0.08  # of both windows
    [share] = cpu_shares([window])
    assert 0 < share < 0.4
    seconds, share = time_here(lambda: sleeping(None), 1, lambda: None)
    assert seconds > 0.02
    assert 0 < share < 0.4


def test_a_side_that_computes_has_used_cpu_time():
    window = HostWindow(BoundSide(lambda x: x @ x, [(torch.ones(500, 500),)]), 3, device="cpu")
    window()
    assert window.cpu > 0


def test_a_baseline_that_hardly_uses_what_the_other_side_uses_is_remarked():
    seconds = {"eager": 100e-3, "fused": 1e-3}
    assert unused_limit(seconds, 0.6, "copy") == (
        "eager reaches 0.006 of the copy limit, fused 0.6: look for a wider type, a loop in Python"
        " or a sleep in the baseline"
    )
    assert unused_limit({"eager": 50e-3, "fused": 1e-3}, 0.6, "copy") is None  # 1.2 %
    assert unused_limit(seconds, 0.4, "copy") is None  # the optimized side does not use it either


def test_a_baseline_that_hardly_uses_the_limit_is_shown(page, gpu, pytester):
    gpu(added=2e-3, doubled=1e-5)
    page()
    stored = peaks.Peaks("simulated-gpu", {"copy": 1e9, "read": 1e9}, {"gpu": "simulated"})
    peaks.save(pytester.path / "baselines" / "simulated-gpu" / "peaks.json", stored)
    result = pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines([f"{SHOWN}added reaches 0.004 of the copy limit, doubled 0.8: *"])


SHOWN = "doubling_test.py::test_doubling[[]doubled-n1001[]]: "


def test_the_shares_stand_in_the_row_and_a_waiting_baseline_is_shown(page, gpu, pytester):
    gpu(added=2e-5, doubled=1e-5, details={"cpu_shares": [0.03, 0.98]})
    page()
    result = pytester.runpytest_subprocess("--aisp-artifacts=kept")
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"{SHOWN}{WAITS}"])


def test_the_shares_of_honest_sides_are_shown_with_vv(page, gpu, pytester):
    gpu(added=2e-5, doubled=1e-5, details={"cpu_shares": [1.0, 3.92]})
    page()
    silent = pytester.runpytest_subprocess()
    silent.stdout.no_fnmatch_line("*CPU time over wall time*")
    verbose = pytester.runpytest_subprocess("-vv")
    verbose.stdout.fnmatch_lines(["*: CPU time over wall time: 1.00 / 3.92"])
