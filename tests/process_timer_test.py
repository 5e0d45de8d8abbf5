"""The fresh processes of a process side: order, output, failures and time limits."""

from __future__ import annotations

import json
import math
import os
import random

import pytest

from pytest_aisp import fresh_process
from pytest_aisp.results.messages import CheckTask, CountTask, Reply, TimeTask
from pytest_aisp.timing.schedule import Budget
from pytest_aisp.worker import client, output_capture, process_timer, server


@fresh_process
def doubled(x):
    return 2 * x


@fresh_process(environment={"THREADS": "1"})
def alone(x):
    return 2 * x


@pytest.fixture
def log(monkeypatch):
    """Replace each worker process by one that logs what happens to it."""
    log = []

    class Worker:
        outputs = ()

        def __init__(self, environment):
            self.name = "alone" if environment else "doubled"
            log.append(f"start {self.name}")

        def ask(self, task, seconds, progress):
            log.append(f"{self.name} {task.side} {seconds}")
            failed = task.side == "fails"
            return Reply(error="died" if failed else None, message="gone", result={"n": 1.0})

        def kill(self):
            log.append(f"kill {self.name}")

        def close(self):
            log.append(f"close {self.name}")

    monkeypatch.setattr(client, "WorkerProcess", Worker)
    return log


def requests(*roles):
    sides = (doubled, alone)
    tasks = (CountTask(metric="memory", side=role, limit=1200.0) for role in roles)
    return list(zip(tasks, sides, strict=True))


def test_processes_start_together_and_answer_in_turn(log):
    results = process_timer.ask_fresh(requests("baseline", "optimized"), lambda text: None)
    assert results == [{"n": 1.0}, {"n": 1.0}]
    assert log == [
        *("start doubled", "start alone"),
        *("doubled baseline 1200.0", "kill doubled", "alone optimized 1200.0", "kill alone"),
        *("close alone", "close doubled"),
    ]


def test_output_of_processes_appears_in_the_order_of_their_answers(log, monkeypatch, capsys):
    class PrintingWorker(client.WorkerProcess):
        def __init__(self, environment):
            super().__init__(environment)
            self.outputs = (
                output_capture.OutputCapture(output_capture.Stream(), output_capture.Stream()),
            )

        def ask(self, task, seconds, progress):
            self.outputs[0].stdout.file.write(f"{task.side}\n".encode())
            self.outputs[0].stdout.file.flush()
            return super().ask(task, seconds, progress)

    monkeypatch.setattr(client, "WorkerProcess", PrintingWorker)
    process_timer.ask_fresh(requests("baseline", "optimized"), lambda text: None)
    assert capsys.readouterr().out == "baseline\noptimized\n"


def test_a_failed_process_ends_the_others(log):
    with pytest.raises(process_timer.ProcessFailed, match="doubled in a fresh process: gone"):
        process_timer.ask_fresh(requests("fails", "optimized"), lambda text: None)
    assert log[2:] == ["doubled fails 1200.0", "close alone", "close doubled"]


@pytest.fixture
def started(log, monkeypatch):
    """Say that a process is ready when it is waited for. The optimized side takes half as long."""

    def ask(worker, task, seconds, progress):
        log.append(f"sample {worker.name}")
        seconds = 1.0 if worker.name == "doubled" else 0.5
        return Reply(result={"seconds": seconds, "cpu_share": 1.0})

    def wait(workers, *others):
        log.append(f"ready {workers[0].name}")

    monkeypatch.setattr(client.WorkerProcess, "ask", ask)
    monkeypatch.setattr(process_timer.select, "select", wait)
    return log


def samples(budget):
    task = TimeTask(function="test_doubling", variant="alone")
    rng = random.Random(1)
    return process_timer.measure_processes(task, (doubled, alone), budget, rng, lambda text: None)


def test_processes_of_a_block_start_together_and_are_timed_in_turn(started):
    made = samples(Budget(blocks=5, least=5))
    assert math.exp(made.value) == pytest.approx(2.0)
    first = started[: started.index("sample doubled")]
    assert sorted(first) == sorted(
        [*["start doubled", "ready doubled"] * 2, *["start alone", "ready alone"] * 2]
    )
    assert max(k for k, line in enumerate(first) if line.startswith("start")) < 4
    made_of = [started.count(f"{what} doubled") for what in ("start", "sample", "close")]
    assert made_of == [12, 12, 12]  # the first block is discarded


def test_a_failed_sample_ends_the_processes_that_wait(started, monkeypatch):
    def ask(worker, task, seconds, progress):
        return Reply(error="died", message="gone")

    monkeypatch.setattr(client.WorkerProcess, "ask", ask)
    with pytest.raises(process_timer.ProcessFailed, match="in a fresh process: gone"):
        samples(Budget(blocks=5, least=5))
    assert sum(line.startswith("start") for line in started) == 4
    assert sum(line.startswith("close") for line in started) == 4


def test_a_task_carries_its_time_limit(monkeypatch):
    worker = client.WorkerProcess()
    read, write = os.pipe()
    try:
        monkeypatch.setattr(worker, "_tasks", write)
        monkeypatch.setattr(
            worker, "_read_line", lambda deadline: b'{"type": "reply", "result": {}}\n'
        )
        worker.ask(CheckTask(), 77.0, lambda text: None)
        assert json.loads(os.read(read, 1 << 16))["limit"] == 77.0
    finally:
        monkeypatch.undo()
        worker.close()
        os.close(read)
        os.close(write)


@pytest.mark.parametrize("seconds", [5.0, 500.0])
def test_a_task_in_this_process_carries_its_time_limit(monkeypatch, seconds):
    inside = server.InProcess()
    monkeypatch.setattr(inside._server.engine, "check", lambda task: {"limit": task.limit})
    assert inside.ask(CheckTask(), seconds, print).result == {"limit": seconds}
