"""Process sides, for settings such as the environment, which a process reads only when it starts.

Each sample comes from one fresh process, which imports the page, makes the inputs, warms up, and
times its own calls. The processes run in the order ABBA, like the windows of every clock. The
processes of a block start together, because importing torch takes most of their time. Then each
process waits for its turn, so only one process works at a time.
"""

from __future__ import annotations

import functools
import random
import select
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from statistics import median
from typing import overload

from ..isolation.interference import Cause, agreed_cause
from ..isolation.monkeypatches import cpu_now, now
from ..page.pair import Side
from ..results.messages import (
    Json,
    PageSource,
    Reply,
    Result,
    SampleTask,
    Task,
    TimeTask,
    case_fields,
)
from ..results.task_results import Amounts, SampleResult
from ..timing import schedule
from ..timing.schedule import Budget, Samples
from . import client
from .client import Progress, WorkerProcess
from .output_capture import OutputCapture, write_text

BLOCKS = 5
WINDOWS = 2
"""The windows of each side in a block."""
SAMPLE_SECONDS = 0.05


class ProcessFailed(RuntimeError):
    """The process of a sample died or returned a wrong result.

    Attributes:
        reply: the error reply.
    """

    def __init__(self, side: str, reply: Reply) -> None:
        super().__init__(f"{side} in a fresh process: {reply.message}")
        self.reply = reply


class ProcessSide:
    """A side for which each sample is a fresh process.

    Attributes:
        side: the function.
        environment: variables to set for the process. The value None removes a variable.
        warmup: calls before the clock starts. With 0, the first call is timed.
    """

    __name__: str

    def __init__(self, side: Side, environment: Mapping[str, str | None], warmup: int) -> None:
        functools.update_wrapper(self, side)
        self.side, self.environment, self.warmup = side, dict(environment), warmup

    def __call__(self, *inputs: object) -> object:
        return self.side(*inputs)


@overload
def fresh_process(side: Side) -> ProcessSide: ...


@overload
def fresh_process(
    *, environment: Mapping[str, str | None] | None = None, warmup: int = 3
) -> Callable[[Side], ProcessSide]: ...


def fresh_process(
    side: Side | None = None,
    *,
    environment: Mapping[str, str | None] | None = None,
    warmup: int = 3,
) -> ProcessSide | Callable[[Side], ProcessSide]:
    """Declare that each sample of a side is a fresh process, started with `environment`.

    Use it as a decorator, with or without arguments. Both sides of a pair must be process sides,
    which may differ only in the environment or in the work before the first call.

    Args:
        environment: variables to set. The value None removes a variable.
        warmup: calls before the clock starts. If `warmup` is 0, the first call of the process is
            timed.
    """

    def wrap(function: Side) -> ProcessSide:
        return ProcessSide(function, environment or {}, warmup)

    return wrap if side is None else wrap(side)


def measure_processes(
    task: TimeTask,
    sides: tuple[ProcessSide, ProcessSide],
    budget: Budget,
    rng: random.Random,
    progress: Progress,
) -> Samples:
    """Run the blocks. Each window is a process, and each process restarts the time limit."""
    few = replace(budget, blocks=min(budget.blocks, BLOCKS), least=BLOCKS, laps=1, seconds=1e9)
    past = task.past if task.versus == "old" else None
    windows = (
        _ProcessWindow(task, sides[0], past, progress),
        _ProcessWindow(task, sides[1], None, progress),
    )
    with closing(_ProcessTimer(windows)) as timer:
        return schedule.measure(timer, few, rng)


class _ProcessTimer:
    clock = "process"

    def __init__(self, windows: tuple[_ProcessWindow, _ProcessWindow]) -> None:
        self.windows = windows
        for window in windows:
            window.start_block = self.start_block

    def start_block(self) -> None:
        """Start the processes of a block, and wait until all of them are ready."""
        waiting = list[WorkerProcess]()
        for window in self.windows:
            window.start(WINDOWS - len(window.waiting))
            waiting += window.waiting
        for worker in waiting:
            select.select([worker], [], [], client.START_SECONDS)

    def close(self) -> None:
        """End the processes that are still waiting."""
        for window in self.windows:
            for worker in window.waiting:
                _end(worker)

    def refresh(self, *, last: bool) -> None:
        """Do nothing: every process has fresh memory."""

    def disturbance(self) -> Cause | None:
        return agreed_cause(None, next(filter(None, [w.disturbed() for w in self.windows]), None))

    def details(self) -> dict[str, Json]:
        return {
            "processes": [window.started for window in self.windows],
            "cpu_shares": [round(median(window.cpu_shares), 3) for window in self.windows],
        }


class _ProcessWindow:
    calls = counted = repeats = 1

    def __init__(
        self, task: TimeTask, side: ProcessSide, past: PageSource | None, progress: Progress
    ) -> None:
        self._task = SampleTask(**case_fields(task), side=side.__name__, past=past)
        self._environment, self._progress = side.environment, progress
        self.started = 0
        self.waiting: deque[WorkerProcess] = deque()
        self.start_block: Callable[[], None]
        self.cpu_shares: list[float] = []
        self._disturbed = ""

    def disturbed(self) -> str:
        """Return the cause that disturbed a process since the last call, or an empty string."""
        text, self._disturbed = self._disturbed, ""
        return text

    def start(self, count: int) -> None:
        self.waiting.extend(client.WorkerProcess(self._environment) for _ in range(count))

    def __call__(self) -> float:
        self.started += 1
        self._progress(f"process {self.started} of {self._task.side}")
        if not self.waiting:
            self.start_block()
        worker = self.waiting.popleft()
        try:
            sample = _ask(worker, self._task, self._task.side, SampleResult)
        finally:
            _end(worker)
        self._disturbed = self._disturbed or sample.disturbed
        self.cpu_shares.append(sample.cpu_share)
        return sample.seconds


def ask_fresh(requests: Sequence[tuple[Task, ProcessSide]], progress: Progress) -> list[Amounts]:
    """Run each task in a fresh process of its process side, and return the results.

    The processes start together, because importing torch takes most of their time, but run the
    tasks one after the other.

    Raises:
        ProcessFailed: if a process failed. The message names the side.
    """
    results = []
    with ExitStack() as stack:
        workers = [stack.enter_context(_fresh_worker(side.environment)) for _, side in requests]
        for worker, (task, side) in zip(workers, requests, strict=True):
            progress(f"a process of {side.__name__}")
            results.append(_ask(worker, task, side.__name__, Amounts))
            worker.kill()  # frees memory for the next process
            _print_again(worker.outputs)  # now, so that outputs stay in order
    return results


@contextmanager
def _fresh_worker(environment: Mapping[str, str | None]) -> Iterator[WorkerProcess]:
    """Start a process, and end it when the context ends."""
    worker = client.WorkerProcess(environment)
    try:
        yield worker
    finally:
        _end(worker)


def _end(worker: WorkerProcess) -> None:
    """End a process, and copy its output to this process's output."""
    worker.close()
    _print_again(worker.outputs)


def _ask(worker: WorkerProcess, task: Task, name: str, kind: type[Result]) -> Result:
    reply = worker.ask(task, task.limit, lambda text: None)
    if reply.error is not None:
        raise ProcessFailed(name, reply)
    return reply.read(kind)


def _print_again(outputs: Sequence[OutputCapture]) -> None:
    """Copy the output of a sample's process to this process's output, which pytest shows."""
    for output in outputs:
        write_text(sys.stdout, output.stdout.take().text)
        write_text(sys.stderr, output.stderr.take().text)


def time_here(
    call: Callable[[], object], warmup: int, synchronize: Callable[[], None]
) -> tuple[float, float]:
    """Return the seconds per call in this process, and its CPU time over its wall time.

    With `warmup=0`, only the first call is timed.
    """
    for _ in range(warmup):
        call()
    if warmup:  # without warm-up, the time includes creating the CUDA context
        synchronize()
    count, cpu, start = 0, cpu_now(), now()
    while count == 0 or (warmup and now() - start < SAMPLE_SECONDS):
        call()
        synchronize()
        count += 1
    seconds = now() - start
    return seconds / count, (cpu_now() - cpu) / seconds
