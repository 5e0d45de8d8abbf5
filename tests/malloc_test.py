"""If a side changes malloc's parameters, that does not slow the other side down."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
from types import SimpleNamespace

import pytest
import torch

from pytest_aisp.checking.inputs import BoundSide
from pytest_aisp.isolation.protections import without
from pytest_aisp.timing import cpu_timer
from pytest_aisp.timing.cpu_timer import HostWindow, UnseenWindow

CALLS, PAGES = 64, 256
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
pytestmark = pytest.mark.skipif(cpu_timer.MALLOPT is None, reason="needs glibc's malloc")


def allocating(x):
    return torch.full((PAGES * 1024,), 2.0) + x


def left_bad(x):
    """Make malloc map each large block of memory anew."""
    libc = ctypes.CDLL(None)
    libc.mallopt(TRIM_THRESHOLD, 0)
    libc.mallopt(MMAP_THRESHOLD, 64 << 10)
    return allocating(x)


@pytest.fixture(autouse=True)
def parameters():
    yield
    cpu_timer.reset_malloc()


def host_window(side):
    return HostWindow(side, CALLS, device="cpu")


def unseen_window(side):
    nothing = SimpleNamespace(**dict.fromkeys(["draw", "write", "keep"], lambda *args: None))
    return UnseenWindow(side, CALLS, 0, nothing)


def faults_after(side, made):
    """Return the page faults in a window of `allocating`, after a window of `side`."""
    windows = [
        made(BoundSide(function, [(torch.ones(1),)])) for function in (allocating, side, allocating)
    ]
    for window in windows[:-1]:
        window()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    windows[-1]()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def count_faults(side, made, unprotected):
    with without(unprotected):
        return faults_after(side, made)


@pytest.mark.parametrize("made", [host_window, unseen_window])
def test_a_side_that_leaves_malloc_bad_does_not_slow_the_other_one_down(made):
    """Each count comes from a process whose heap has no free blocks of earlier tests.

    It is forked from a server that has only imported what a count needs.
    """
    cases = [(left_bad, made, ["malloc"]), (left_bad, made, []), (allocating, made, [])]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", cpu_timer.__name__])
    with context.Pool(1, maxtasksperchild=1) as pool:
        left, protected, honest = pool.starmap(count_faults, cases, chunksize=1)
    assert left > CALLS * PAGES / 2
    assert protected < honest + CALLS * PAGES / 4


def test_parameters_that_the_user_has_set_stay(monkeypatch):
    monkeypatch.setitem(os.environ, "MALLOC_TRIM_THRESHOLD_", "1000")
    assert cpu_timer.find_mallopt() is None
