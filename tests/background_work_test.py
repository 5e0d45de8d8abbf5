"""Threads that still work after a call are distinguished from idle ones, also on a busy machine."""

from __future__ import annotations

import hashlib
import itertools
import os
import queue
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from logging.handlers import QueueListener

import pytest
import torch

from pytest_aisp.isolation import interference
from pytest_aisp.isolation.interference import BackgroundWork

BUSY_LOOP = "while True: pass"
IN_C_CODE = (hashlib.pbkdf2_hmac, "sha256", b"", b"", 200_000)
IN_LIBRARY_CODE = (textwrap.wrap, "words " * 200_000)


@pytest.fixture(params=["free", "busy"], autouse=True)
def machine(request):
    """Pin this process to one core. On the busy machine, two busy loops run on the same core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    count = {"free": 0, "busy": 2}[request.param]
    others = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(count)]
    yield
    os.sched_setaffinity(0, cores)
    for other in others:
        other.kill()
        other.wait()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.mark.parametrize("work", [IN_C_CODE, IN_LIBRARY_CODE], ids=["c", "library"])
def test_a_working_pool_is_found(pool, work):
    before = BackgroundWork.now()
    pool.submit(*work)
    assert "a thread still running after its call: ThreadPoolExecutor" in (before.left() or "")


def test_an_idle_pool_is_accepted():
    for _ in range(5):
        before = BackgroundWork.now()
        with ThreadPoolExecutor(4) as fresh:
            list(fresh.map(hashlib.sha256, [b"x" * 100_000] * 8))
            assert before.left() is None


def test_the_threads_of_torch_are_accepted():
    before = BackgroundWork.now()
    x = torch.ones(512, 512, requires_grad=True)
    (x @ x).sum().backward()  # OpenMP's and autograd's threads
    assert before.left() is None


def test_a_thread_that_waits_for_a_time_is_accepted():
    before = BackgroundWork.now()
    timer = threading.Timer(60, print)  # waits like the monitor of a tqdm bar
    timer.start()
    try:
        assert before.left() is None
    finally:
        timer.cancel()


def test_a_thread_that_waits_for_a_queue_is_accepted():
    before = BackgroundWork.now()
    listener = QueueListener(queue.Queue())  # waits like the pinning thread of DataLoader
    listener.start()
    try:
        assert before.left() is None
    finally:
        listener.stop()


def test_a_working_pool_that_sleeps_for_a_moment_is_found(pool, monkeypatch):
    states = itertools.chain("S", itertools.repeat("R"))
    monkeypatch.setattr(interference, "_state", lambda folder: next(states))
    before = BackgroundWork.now()
    pool.submit(*IN_C_CODE)
    assert before.left()


def test_an_idle_thread_that_waits_for_a_core_is_accepted(monkeypatch):
    states = itertools.chain("R" * 8, itertools.repeat("S"))
    monkeypatch.setattr(interference, "_state", lambda folder: next(states))
    test_a_thread_that_waits_for_a_queue_is_accepted()


def test_a_pool_that_worked_inside_the_call_and_is_as_old_as_the_page_is_accepted(pool):
    list(pool.map(hashlib.sha256, [b"x"] * 2))  # both threads have started
    before = BackgroundWork.now()
    pool.submit(*IN_C_CODE).result()
    assert before.left() is None


def test_an_old_thread_that_waits_in_the_page_after_its_work_is_accepted():
    tasks, stop = queue.SimpleQueue(), object()

    def serve():
        while (task := tasks.get()) is not stop:
            task.set_result(hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000))

    thread = threading.Thread(target=serve)
    thread.start()
    before, task = BackgroundWork.now(), Future()
    tasks.put(task)
    task.result()
    try:
        assert before.left() is None
    finally:
        tasks.put(stop)
        thread.join()


def test_an_old_thread_that_works_after_the_call_is_found(pool):
    list(pool.map(hashlib.sha256, [b"x"] * 2))
    before = BackgroundWork.now()
    pool.submit(*IN_C_CODE)
    while not before.used_cpu():  # on a busy machine the work begins late
        time.sleep(0.001)
    assert "a thread still running after its call: ThreadPoolExecutor" in (before.left() or "")
