"""Draw new input values in a process that runs no side.

The seeds are secret and never leave that process, so nobody can compute answers in advance. One
input process draws the values of all cases that this process times, and dies with this process.
"""

from __future__ import annotations

import atexit
import math
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from subprocess import TimeoutExpired
from typing import TYPE_CHECKING, NoReturn

from msgspec.structs import replace

from ..checking.page_values import Inputs, draw_inputs, seeded
from ..isolation.protections import enabled
from ..page.pair import PageError, Pair
from ..results.messages import CheckTask, DrawTask, HoldTask, Json, Task, TimeTask, case_fields
from ..util import pytree
from .client import Launched, WorkerProcess

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
"""Each tensor starts at a multiple of this many bytes, so that any type can be read there."""
SHARE = 0.8
"""The input process gets this share of the time limit, so that its error comes before a timeout."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Idle OpenMP threads spin for a while, which would disturb the windows."""
POLL_SECONDS = 0.01
"""Seconds between two checks of a forked process that should end."""
_processes: list[WorkerProcess] = []


def _start() -> None:
    """Start the process if it is not running."""
    if not (_processes and _processes[0].alive):
        close()
        _processes.append(WorkerProcess(ONE_THREAD))


def fork_early(task: Task) -> None:
    """Fork the input process if the first task (`task`) needs it. No page has been imported yet.

    This takes 10 ms. A new process would need two seconds to import torch.
    """
    if isinstance(task, (CheckTask, HoldTask, TimeTask)) and _wanted(task):
        _processes.append(ForkedWorker())


class ForkedWorker(WorkerProcess):
    """A worker process that is a fork of this process."""

    def _launch(self, task_read: int, answer_write: int, *_: object) -> Launched:
        pid = os.fork()
        if pid:
            return Child(pid)
        try:
            self._become_worker(task_read, answer_write)
        finally:
            os._exit(1)

    def _become_worker(self, task_read: int, answer_write: int) -> NoReturn:
        import torch

        from .server import main

        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        files = null, self.outputs[0].stdout.file.fileno(), self.outputs[0].stderr.file.fileno()
        for target, file in enumerate(files):
            os.dup2(file, target)
        torch.set_num_threads(1)
        main(task_read, answer_write)
        os._exit(0)


class Child:
    """A forked process, with the methods of `Popen` that a `WorkerProcess` uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None if the process is running."""
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # page code called wait
                pid, status = self.pid, 0
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process and return its exit code."""
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutExpired("fork", timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return code

    def kill(self) -> None:
        """Kill the process."""
        os.kill(self.pid, signal.SIGKILL)


def close() -> None:
    """End the process."""
    while _processes:
        _processes.pop().close()


atexit.register(close)
os.register_at_fork(after_in_child=_processes.clear)  # a forked child must not end the process


class InputProcess:
    """Draws values of one case in another process, and reads them from shared memory."""

    def __init__(self, task: TimeTask, file: int) -> None:
        self._file = file
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._task = DrawTask(**{**case_fields(task), "at": "case"}, values=path, count=0)

    def draw(self, count: int, like: Inputs) -> list[Inputs]:
        """Return `count` value sets with the types, shapes and plain values of `like`.

        Raises:
            PageError: if the process fails, or if the drawn values have other shapes.
        """
        forms, nbytes = form(like), set_bytes(like)
        task = replace(self._task, count=count)
        _start()
        reply = _processes[0].ask(task, SHARE * task.limit, lambda text: None)
        if reply.error is not None:
            raise PageError(
                f"inputs failed in the process that draws new values: {reply.message}\n"
                "inputs must work in a process that has only imported the page"
            )
        if reply.result["form"] != forms:
            raise PageError(
                f"inputs returned {reply.result['form']} in another process, and {forms} here\n"
                "Shapes and types may depend on the size only"
            )
        return [_read(self._file, number * nbytes, like) for number in range(count)]


@contextmanager
def values_for(task: TimeTask) -> Iterator[InputProcess | None]:
    """Yield the source of new values for `task`, or None if its windows get no new values."""
    if not _wanted(task):
        yield None
        return
    file = os.memfd_create("aisp-inputs")
    _start()  # it imports torch while this process computes the reference
    try:
        yield InputProcess(task, file)
    finally:
        os.close(file)


def _wanted(task: CheckTask | HoldTask | TimeTask) -> bool:
    return task.device == "cpu" and hasattr(os, "memfd_create") and enabled("new-values")


def form(values: Inputs) -> list[str]:
    """Return the types and shapes of all tensors as texts."""
    return [f"{t.dtype}{list(t.shape)}" for _, t in pytree.tensors(values)]


def set_bytes(values: Inputs) -> int:
    """Return the bytes of a value set in the file."""
    return sum(_padded(tensor) for _, tensor in pytree.tensors(values))


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def _read(file: int, offset: int, like: Inputs) -> Inputs:
    import torch

    data = torch.empty(max(set_bytes(like), 1), dtype=torch.uint8)
    os.preadv(file, [data.numpy().data], offset)
    at = 0

    def next_tensor(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal at
        part = data[at : at + tensor.numel() * tensor.element_size()]
        at += _padded(tensor)
        return part.view(tensor.dtype).view(tensor.shape).requires_grad_(tensor.requires_grad)

    return pytree.map_tensors(next_tensor, like)


def write_value_sets(pair: Pair, task: DrawTask) -> Mapping[str, Json]:
    """Draw ``task.count`` value sets from a secret seed and write their bytes to the file."""
    import torch

    forms: list[str] = []
    with open(task.values, "wb") as file, seeded(random.SystemRandom().getrandbits(62)):
        for _ in range(task.count):
            values = draw_inputs(pair, task.device, task.size)
            if forms and form(values) != forms:
                raise PageError("shapes and types may depend on the size only")
            forms = form(values)
            for _, tensor in pytree.tensors(values):
                size = tensor.numel() * tensor.element_size()
                file.write(pytree.bits(tensor).view(torch.uint8).numpy().tobytes())
                file.write(bytes(_padded(tensor) - size))
    return {"form": forms}
