"""Threads that are at work after a call are told from idle ones, on a busy machine too."""

from __future__ import annotations

import hashlib
import itertools
import os
import queue
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from logging.handlers import QueueListener

import pytest
import torch

from pytest_aisp.isolation import background_work
from pytest_aisp.isolation.background_work import BackgroundWork

BUSY = "while True: pass"


@pytest.fixture(params=["free", "busy"], autouse=True)
def machine(request):
    """One core for this process, and two others that want it where the machine is busy."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    count = {"free": 0, "busy": 2}[request.param]
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    yield
    os.sched_setaffinity(0, cores)
    for other in others:
        other.kill()
        other.wait()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_a_pool_at_work_in_c_code_is_found(pool):
    before = BackgroundWork.now()
    pool.submit(hashlib.pbkdf2_hmac, "sha256", b"", b"", 200_000)
    assert "a thread at work after its call: ThreadPoolExecutor" in (before.left() or "")


def test_a_pool_at_work_in_library_code_is_found(pool):
    before = BackgroundWork.now()
    pool.submit(textwrap.wrap, "words " * 200_000)
    assert "a thread at work after its call: ThreadPoolExecutor" in (before.left() or "")


def test_an_idle_pool_is_not_accused(pool):
    for _ in range(5):
        before = BackgroundWork.now()
        with ThreadPoolExecutor(4) as fresh:
            list(fresh.map(hashlib.sha256, [b"x" * 100_000] * 8))
            assert before.left() is None


def test_threads_of_torch_are_not_accused():
    before = BackgroundWork.now()
    x = torch.ones(512, 512, requires_grad=True)
    (x @ x).sum().backward()  # OpenMP's and autograd's threads
    assert before.left() is None


def test_a_thread_that_waits_for_its_time_is_not_accused():
    before = BackgroundWork.now()
    timer = threading.Timer(60, print)  # waits as the monitor of a tqdm bar does
    timer.start()
    try:
        assert before.left() is None
    finally:
        timer.cancel()


def test_a_thread_that_waits_for_a_queue_is_not_accused():
    before = BackgroundWork.now()
    listener = QueueListener(queue.Queue())  # waits as DataLoader's pinning thread does
    listener.start()
    try:
        assert before.left() is None
    finally:
        listener.stop()


def test_a_pool_that_waits_for_a_lock_for_a_moment_is_found(pool, monkeypatch):
    states = itertools.chain("S", itertools.repeat("R"))
    monkeypatch.setattr(background_work, "_state", lambda folder: next(states))
    before = BackgroundWork.now()
    pool.submit(hashlib.pbkdf2_hmac, "sha256", b"", b"", 200_000)
    assert before.left()


def test_an_idle_thread_that_waits_for_a_core_is_not_accused(monkeypatch):
    states = itertools.chain("R" * 8, itertools.repeat("S"))
    monkeypatch.setattr(background_work, "_state", lambda folder: next(states))
    test_a_thread_that_waits_for_a_queue_is_not_accused()
