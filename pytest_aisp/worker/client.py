"""The workers that the pytest process sends tasks to: a process, or a recorded run.

A `WorkerProcess` receives tasks over a pipe and is killed if it exceeds a time limit. A
`ReplayWorker` answers with the samples of a recorded run.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Protocol

from msgspec.structs import replace

from ..results import encoding, messages, run_reader
from ..results.export import path_below
from ..results.messages import (
    CaseTask,
    ChangedTask,
    CheckTask,
    CountTask,
    FactsTask,
    Json,
    ProgressUpdate,
    Reply,
    Task,
    TimeTask,
    failed,
    timeout_reply,
)
from ..results.row import JournalLine
from ..results.verdict import DISTURBED, NOT_RECORDED
from ..util.device import Machine
from .output_capture import OutputCapture, Stream

Progress = Callable[[str], None]
PROGRAM = ("-m", "pytest_aisp.worker")
START_SECONDS = 120.0
"""Seconds added to the first task's time limit: importing torch from a cold disk takes a minute."""
EXIT_SECONDS = 3.0
"""Seconds that a process may take to end after its pipe is closed. One second is usually enough."""
POLL_SECONDS = 0.5
"""Seconds between two checks that the process is alive, while the client waits for an answer."""


class Worker(Protocol):
    """An object that answers tasks: a process, several ranks, this process, or a recording."""

    def ask(self, task: Task, seconds: float, progress: Progress) -> Reply: ...

    def close(self) -> None: ...


class Launched(Protocol):
    """The part of `Popen` that a `WorkerProcess` uses."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class WorkerProcess:
    """A worker process, which is started immediately, and killed at its first fault.

    Args:
        environment: variables to set for the process. The value None removes a variable.
        launcher: command that runs the interpreter, such as a sanitizer.
        python: the command of another Python interpreter.

    Attributes:
        outputs: the captured output of the process, as a list with one element.
    """

    def __init__(
        self,
        environment: Mapping[str, str | None] | None = None,
        launcher: Sequence[str] = (),
        python: Sequence[str] = (),
    ) -> None:
        task_read, self._tasks = os.pipe()
        self._answers, answer_write = os.pipe()
        self.outputs = (OutputCapture(Stream(), Stream()),)
        self._buffer = b""
        self._ready = self._killed = False
        command = [*launcher, *(python or interpreter())]
        self._process = self._launch(task_read, answer_write, environment or {}, command)
        os.close(task_read)
        os.close(answer_write)

    def _launch(
        self,
        task_read: int,
        answer_write: int,
        environment: Mapping[str, str | None],
        command: Sequence[str],
    ) -> Launched:
        return Popen(
            [*command, *PROGRAM, str(task_read), str(answer_write)],
            stdin=DEVNULL,
            stdout=self.outputs[0].stdout.file,
            stderr=self.outputs[0].stderr.file,
            pass_fds=(task_read, answer_write),
            env=worker_environment(environment),
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def closed(self) -> bool:
        """Whether the process can no longer print."""
        return self.outputs[0].stdout.file.closed

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the file descriptor from which the process's answers can be read."""
        return self._answers

    def ask(self, task: Task, seconds: float, progress: Progress) -> Reply:
        """Return the reply to `task`. A fault, a hang or an interrupt kills the process."""
        doing: str = task.kind if self._ready else "start"
        limit = seconds if self._ready else START_SECONDS + seconds
        deadline = time.monotonic() + limit
        try:
            _write_all(self._tasks, encoding.encode(replace(task, limit=seconds)))
            while True:
                line = self._read_line(deadline)
                if line is None:
                    self.kill()
                    return timeout_reply(limit, doing, self._trace())
                if not line:
                    return self._dead(doing)
                answer = encoding.decode(line)
                if isinstance(answer, Reply):
                    # The next task needs a process that can use its GPU and does not occupy
                    # memory that other processes need.
                    if answer.error == "fault" or answer.exhausted:
                        self.kill()
                    return answer
                assert isinstance(answer, ProgressUpdate)
                doing = answer.text
                deadline = time.monotonic() + seconds  # the time limit restarts at each message
                if doing == messages.READY:
                    self._ready, limit, doing = True, seconds, task.kind
                progress(doing)
        except BrokenPipeError:
            return self._dead(doing)
        except BaseException:
            self.kill()
            raise

    def _read_line(self, deadline: float) -> bytes | None:
        """Return the next line, an empty line at the end of the pipe, or None at the deadline."""
        while b"\n" not in self._buffer:
            alive, remaining = self.alive, max(0, deadline - time.monotonic())
            seconds = min(remaining, POLL_SECONDS) if alive else 0
            if not select.select([self._answers], [], [], seconds)[0]:
                if not alive:  # a child of the process may hold the pipe open
                    return b""
                if not remaining:
                    return None
                continue
            chunk = os.read(self._answers, 1 << 20)
            if not chunk:
                return b""
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line + b"\n"

    def _dead(self, doing: str) -> Reply:
        with suppress(TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        stuck = self.alive
        self.kill()
        code = self._process.wait()
        how = f"ended {describe_exit(code)}"
        if stuck and code == -signal.SIGKILL:
            how = "exited, but a thread of a side keeps it alive"
        return failed("died", f"the worker process {how}", doing, self._trace())

    def _trace(self) -> str:
        return "\n".join(self.outputs[0].last(20))

    def kill(self) -> None:
        """Kill the process and its group. Other members of the group could outlive the process."""
        if not self._killed:
            self._killed = True  # later, another group may get the same id
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self.alive:
            with suppress(ProcessLookupError):
                self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process and close its pipes."""
        self.kill()
        for fd in (self._tasks, self._answers):
            with suppress(OSError):
                os.close(fd)
        self.outputs[0].close()


def interpreter() -> list[str]:
    """Return the command for Python without the current folder at the head of its path.

    If the current folder is on pytest's own import path, `worker_environment` passes the folder on.
    """
    return [sys.executable, "-P"] if sys.version_info >= (3, 11) else [sys.executable]


def worker_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return this process's environment, with the import path and `changes` applied.

    A variable whose value in `changes` is None is removed.
    """
    path = os.pathsep.join(p for p in sys.path if p)
    merged = {**os.environ, "PYTHONPATH": path, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def describe_exit(code: int) -> str:
    """Return a description of an exit status: ``by SIGSEGV`` or ``with exit code 3``."""
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


CaseName = tuple[str, str, int]
"""A case's identity across runs: its page's path below the root, its key, its number of GPUs."""


class ReplayError(Exception):
    """The file contains no recorded run."""


class ReplayWorker:
    """A worker that answers with the results of a recorded run.

    Args:
        path: an artifacts folder, or its `results.jsonl`.

    Attributes:
        dropped: a note about an incomplete line that was ignored, or an empty string.
        machine: the machine that the run was recorded on, or None if unknown. The verdicts are for
            this machine.
        invalid: the reasons why the run was invalid, or nothing for a valid run.

    Raises:
        ReplayError: if the file cannot be read as a recorded run.
    """

    def __init__(self, path: Path) -> None:
        folder = run_reader.folder_of(path)
        file = folder / run_reader.JOURNAL if folder.is_dir() else path
        self._folder = file.parent
        self.machine: Machine | None = None
        self.invalid: list[str] = []
        root: str | None = None
        try:
            lines, lost = run_reader.journal(file)
            if (self._folder / run_reader.MANIFEST).exists():
                manifest = run_reader.manifest(self._folder)
                root, machine, self.invalid = manifest.root, manifest.machine, manifest.invalid
                self.machine = Machine(
                    machine.arch,
                    machine.product,
                    machine.name,
                    tuple(machine.gpus),
                    machine.versions,
                    machine.facts,
                )
        except run_reader.RunError as error:
            raise ReplayError(f"--aisp-replay={path}: no run to judge again: {error}") from None
        self.dropped = "; ".join(lost)
        self.rows = {_name_of_row(line, root): line for line in lines}
        self._answered: dict[tuple[CaseName, str], int] = {}

    def ask(self, task: Task, seconds: float, progress: Progress) -> Reply:
        """Return the recorded reply to `task`. Timings are returned in the recorded order."""
        if not isinstance(task, CaseTask):
            return Reply(error="page", message=f"the recording holds no {task.kind}")
        name = name_of_task(task)
        if (row := self.rows.get(name)) is None:
            case = f"{task.function}[{task.variant}] at {dict(task.size)}"
            why = f"; {self.dropped}" if self.dropped else ""
            return Reply(error="page", message=f"the recording holds no {case}{why}")
        if isinstance(task, FactsTask):
            return Reply(result=row.environment)
        kind = "checks" if isinstance(task, (CheckTask, CountTask)) else "timings"
        try:
            samples = run_reader.read(self._folder, row.samples)
        except run_reader.SamplesError as error:
            return Reply(error="page", message=f"the recording cannot be judged again: {error}")
        against: dict[str, list[dict[str, Json]]] = {}
        for result in samples["against"]:
            against.setdefault(result["side"], []).append(result)
        if isinstance(task, ChangedTask):
            code = {"why_timed": dict.fromkeys(row.unchanged, ""), "machine_code": row.machine_code}
            return Reply(result={**dict.fromkeys(against, True), **code})
        answers = samples["checks"] if kind == "checks" else samples["timings"]
        if isinstance(task, TimeTask) and task.versus == "old":
            kind, answers = f"timings against a commit ({task.side})", against.get(task.side, [])
        number = self._answered.get((name, kind), 0)
        self._answered[name, kind] = number + 1
        if number >= len(answers) and kind == "timings" and row.verdict == DISTURBED:
            return Reply(error="disturbed", message="; ".join(row.reasons))
        if number >= len(answers):
            word = kind if len(answers) != 1 else kind.removesuffix("s")
            message = f"{NOT_RECORDED} {len(answers)} {word} of it, and one more is needed"
            return Reply(error="unrecorded", message=message)
        return Reply(result=answers[number])

    def close(self) -> None:
        """Do nothing, because a recording holds no resources."""


def _name_of_row(row: JournalLine, root: str | None) -> CaseName:
    # The page's path must be relative to the root, and only the manifest contains the root.
    page = row.nodeid.partition("::")[0] if root is None else path_below(row.page, root)
    return page, row.key, row.gpus


def name_of_task(task: CaseTask) -> CaseName:
    """Return the identity of the case that a task is for."""
    key = f"{Path(task.page).name}::{task.function}[{task.case}]"
    return path_below(task.page, task.root), key, task.gpus
