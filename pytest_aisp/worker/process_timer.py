"""Process sides: what a process decides once (environment, allocator, threads) takes a fresh one.

Each sample is one fresh process that imports the page, makes the inputs, warms up, and times its
own calls; the order of the processes is ABBA as everywhere.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..isolation.monkeypatches import now
from ..results.messages import PageSource, Reply, SampleTask, Task, TimeTask, case_fields
from ..timing import schedule
from ..timing.schedule import Budget, Samples
from .output_capture import OutputCapture, say

if TYPE_CHECKING:
    from .client import WorkerProcess

BLOCKS = 5
SAMPLE_SECONDS = 0.05


class ProcessFailed(RuntimeError):
    """A sample's process died or gave a wrong result; `reply` is what it said."""

    def __init__(self, side: str, reply: Reply) -> None:
        super().__init__(f"{side} in a fresh process: {reply.message}")
        self.reply = reply


class ProcessSide:
    """A side each of whose samples is a fresh process.

    Attributes:
        side: the function.
        environment: variables that its process starts with; None removes one.
        warmup: calls before the clock starts; 0 times the first call.
    """

    def __init__(
        self, side: Callable[..., Any], environment: Mapping[str, str | None], warmup: int
    ) -> None:
        functools.update_wrapper(self, side)
        self.side, self.environment, self.warmup = side, dict(environment), warmup

    def __call__(self, *inputs: Any) -> Any:
        return self.side(*inputs)


def fresh_process(
    side: Callable[..., Any] | None = None,
    *,
    environment: Mapping[str, str | None] | None = None,
    warmup: int = 3,
) -> Any:
    """Declare that each sample of a side is a fresh process, started with `environment`.

    Used as a decorator, bare or with arguments. Both sides of a pair must be process sides, and
    differ only in their environment or in what they do before the first call.

    Args:
        environment: variables to set; None as a value removes one.
        warmup: calls before the clock starts; 0 times the first call of the process.
    """

    def wrap(function: Callable[..., Any]) -> ProcessSide:
        return ProcessSide(function, environment or {}, warmup)

    return wrap if side is None else wrap(side)


def measure_processes(
    task: TimeTask,
    sides: Sequence[tuple[Any, Any]],
    budget: Budget,
    rng: random.Random,
    progress: Callable[[str], None],
) -> Samples:
    """Run the blocks, one process a window; each reports itself, which renews the time limit."""
    few = replace(budget, blocks=min(budget.blocks, BLOCKS), least=BLOCKS, laps=1, seconds=1e9)
    return schedule.measure(_ProcessBout(task, [side for side, _ in sides], progress), few, rng)


class _ProcessBout:
    clock = "process"

    def __init__(
        self, task: TimeTask, sides: Sequence[Any], progress: Callable[[str], None]
    ) -> None:
        first, second = sides
        past = task.past if task.versus == "old" else None
        self.windows = (
            _ProcessWindow(task, first, past, progress),
            _ProcessWindow(task, second, None, progress),
        )

    def refresh(self, *, last: bool) -> None:
        """Every process has fresh memory."""

    def disturbance(self) -> str | None:
        return None

    def other(self) -> dict[str, Any]:
        return {}

    def details(self) -> dict[str, Any]:
        return {"processes": [w.started for w in self.windows]}


class _ProcessWindow:
    calls = counted = repeats = 1

    def __init__(
        self,
        task: TimeTask,
        side: Any,
        past: PageSource | None,
        progress: Callable[[str], None],
    ) -> None:
        self._progress = progress
        self.task = SampleTask(**case_fields(task), side=side.__name__, past=past)
        self.environment, self.started = side.environment, 0

    def __call__(self) -> float:
        self.started += 1
        self._progress(f"process {self.started} of {self.task.side}")
        with _fresh(self.environment) as bench:
            return float(_answer(bench, self.task, self.task.side)["seconds"])


def ask_fresh(
    asked: Sequence[tuple[Task, Any]], progress: Callable[[str], None]
) -> list[Mapping[str, Any]]:
    """Return the result of each task in a fresh process of its process side.

    They answer one after the other, but start together: most of what they take is importing torch.

    Raises:
        ProcessFailed: naming the first side whose process failed.
    """
    found = []
    with contextlib.ExitStack() as stack:
        benches = [stack.enter_context(_fresh(side.environment)) for _, side in asked]
        for bench, (task, side) in zip(benches, asked, strict=True):
            progress(f"a process of {side.__name__}")
            found.append(_answer(bench, task, side.__name__))
            bench.kill()  # its memory is the next one's to take
            _say_again(bench.printed)  # and its prints come before the next one's
    return found


@contextlib.contextmanager
def _fresh(environment: Mapping[str, str | None]) -> Iterator[WorkerProcess]:
    """Start a process; print here what it has printed when it ends."""
    from .client import WorkerProcess

    bench = WorkerProcess(environment)
    try:
        yield bench
    finally:
        bench.close()
        _say_again(bench.printed)


def _answer(bench: WorkerProcess, task: Task, name: str) -> Mapping[str, Any]:
    reply = bench.ask(task, task.limit, lambda text: None)
    if reply.error is not None:
        raise ProcessFailed(name, reply)
    return reply.result


def _say_again(printed: Sequence[OutputCapture]) -> None:
    """Print here what a sample's process has printed: this process's output is read."""
    for one in printed:
        say(sys.stdout, one.stdout.take().text)
        say(sys.stderr, one.stderr.take().text)


def time_here(call: Callable[[], Any], warmup: int, synchronize: Callable[[], None]) -> float:
    """Return the seconds per call in this process; of its very first one with `warmup=0`."""
    for _ in range(warmup):
        call()
    if warmup:  # else the context that the first call makes would be made here, untimed
        synchronize()
    count, start = 0, now()
    while count == 0 or (warmup and now() - start < SAMPLE_SECONDS):
        call()
        synchronize()
        count += 1
    return (now() - start) / count
