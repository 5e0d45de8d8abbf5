"""The fresh processes of a process side: how long they may take."""

from __future__ import annotations

import json
import os

import pytest

from pytest_aisp import fresh_process
from pytest_aisp.bench import client, processes, server
from pytest_aisp.results.messages import Reply, Task


@fresh_process
def doubled(x):
    return 2 * x


def test_a_process_may_be_silent_for_as_long_as_its_task(monkeypatch):
    limits = []

    class Bench:
        printed = ()

        def __init__(self, environment):
            pass

        def ask(self, task, seconds, progress):
            limits.append(seconds)
            return Reply(result={"seconds": 1.0})

        def close(self):
            pass

    monkeypatch.setattr(client, "BenchProcess", Bench)
    processes.ask_fresh(Task(kind="count", limit=1200.0), doubled, lambda text: None)
    assert limits == [1200.0]


def test_a_task_says_how_long_it_may_take(monkeypatch):
    bench = client.BenchProcess()
    read, write = os.pipe()
    try:
        monkeypatch.setattr(bench, "_ask", write)
        monkeypatch.setattr(bench, "_line", lambda deadline: b'{"result": {}}\n')
        bench.ask(Task(kind="check"), 77.0, lambda text: None)
        assert json.loads(os.read(read, 1 << 16))["limit"] == 77.0
    finally:
        monkeypatch.undo()
        bench.close()
        os.close(read)
        os.close(write)


@pytest.mark.parametrize("seconds", [5.0, 500.0])
def test_a_task_in_this_process_says_it_too(monkeypatch, seconds):
    inside = server.InProcess()
    monkeypatch.setattr(inside._server.engine, "check", lambda task: {"limit": task.limit})
    assert inside.ask(Task(kind="check"), seconds, print).result == {"limit": seconds}
