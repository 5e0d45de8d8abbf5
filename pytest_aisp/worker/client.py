"""The other end of the pipe: start a worker process, ask it, kill it when it is late."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Protocol

from msgspec.structs import replace

from ..results import messages
from ..results.messages import ProgressUpdate, Reply, Task, failed
from .output_capture import OutputCapture, Stream

Progress = Callable[[str], None]
START_SECONDS = 120.0
"""Time to start a worker process, beside a task's: torch from a cold disk takes a minute."""
END_SECONDS = 3.0
"""Time to end for a process whose pipe is closed; what ends by itself takes less than a second."""
LOOK_SECONDS = 0.5
"""How often a process is looked at while its answer is awaited."""
STUCK = "was left and does not end (a thread of a side keeps it)"
"""What is said of a process that neither answers nor ends."""


class Worker(Protocol):
    """Whatever answers tasks: a process, this process, a recording."""

    def ask(self, task: Task, seconds: float, progress: Progress) -> Reply: ...

    def close(self) -> None: ...


class WorkerProcess:
    """A worker process of our own, started at once, killed at the first fault.

    Args:
        environment: variables to set for it; None as a value removes one.
        under: command that it is started under.

    Attributes:
        printed: what it prints, one process's.
    """

    def __init__(
        self, environment: Mapping[str, str | None] | None = None, under: Sequence[str] = ()
    ) -> None:
        ask_read, self._ask = os.pipe()
        self._answers, answer_write = os.pipe()
        self.printed = (OutputCapture(Stream(), Stream()),)
        self._buffer = b""
        self._ready = self._killed = False
        self._process = Popen(
            [*under, *python(), "-m", "pytest_aisp.worker", str(ask_read), str(answer_write)],
            stdin=DEVNULL,
            stdout=self.printed[0].stdout.file,
            stderr=self.printed[0].stderr.file,
            pass_fds=(ask_read, answer_write),
            env=worker_environment(environment or {}),
            start_new_session=True,
        )
        os.close(ask_read)
        os.close(answer_write)

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    @property
    def closed(self) -> bool:
        """Whether it prints no more."""
        return self.printed[0].stdout.file.closed

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ask(self, task: Task, seconds: float, progress: Progress) -> Reply:
        """Return the reply to `task`. A fault, a hang or an interrupt kills the process."""
        doing: str = task.kind if self._ready else "start"
        limit = seconds if self._ready else START_SECONDS + seconds
        deadline = time.monotonic() + limit
        try:
            _write_all(self._ask, messages.encode(replace(task, limit=seconds)))
            while True:
                line = self._line(deadline)
                if line is None:
                    return self._late(limit, doing)
                if not line:
                    return self._dead(doing)
                answer = messages.decode(line)
                if isinstance(answer, Reply):
                    return self._answered(answer)
                assert isinstance(answer, ProgressUpdate)
                doing = answer.text
                deadline = time.monotonic() + seconds  # the limit is on silence, not on long work
                if doing == messages.READY:
                    self._ready, limit, doing = True, seconds, task.kind
                progress(doing)
        except BrokenPipeError:
            return self._dead(doing)
        except BaseException:
            self.kill()
            raise

    def _line(self, deadline: float) -> bytes | None:
        """Return the next line; empty when no more will come, None at the deadline."""
        while b"\n" not in self._buffer:
            alive, left = self.alive, max(0, deadline - time.monotonic())
            if not self._readable(min(left, LOOK_SECONDS) if alive else 0):
                if not alive:  # a child of its own may hold the pipe open
                    return b""
                if not left:
                    return None
                continue
            chunk = os.read(self._answers, 1 << 20)
            if not chunk:
                return b""
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line + b"\n"

    def _readable(self, seconds: float) -> bool:
        return bool(select.select([self._answers], [], [], seconds)[0])

    def _answered(self, reply: Reply) -> Reply:
        # The next task gets a process that can use its GPU, and leaves others room on it.
        if reply.error == "fault" or reply.exhausted:
            self.kill()
        return reply

    def _late(self, seconds: float, doing: str) -> Reply:
        self.kill()
        return late_reply(seconds, doing, self.output())

    def _dead(self, doing: str) -> Reply:
        with suppress(TimeoutExpired):
            self._process.wait(END_SECONDS)
        stuck = self.alive
        self.kill()
        code = self._process.wait()
        how = STUCK if stuck and code == -signal.SIGKILL else f"ended {how_it_ended(code)}"
        return failed("died", f"the worker process {how}", doing, self.output())

    def output(self, lines: int = 20) -> str:
        """Return the last lines that the process printed, a crash's stack without our frames."""
        return "\n".join(self.printed[0].last(lines))

    def kill(self) -> None:
        """Kill the process, once, and everything in its process group, which may outlive it."""
        if not self._killed:
            self._killed = True  # later the number of the group may be another's
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self.alive:
            with suppress(ProcessLookupError):
                self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process and release its pipes."""
        self.kill()
        for fd in (self._ask, self._answers):
            try:
                os.close(fd)
            except OSError:
                continue
        self.printed[0].close()


def python() -> list[str]:
    """Return the interpreter, which takes nothing in the current folder for a module of its path.

    What pytest's own path has, the current folder where that is so, is in `worker_environment`.
    """
    return [sys.executable, "-P"] if sys.version_info >= (3, 11) else [sys.executable]


def worker_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the variables that a process of ours starts with: these, the path, the changes."""
    path = os.pathsep.join(p for p in sys.path if p)
    merged = {**os.environ, "PYTHONPATH": path, **changes}
    return {name: value for name, value in merged.items() if value is not None}


LONGER = "give it longer with -o aisp_timeout_multiplier=2"
"""The last line of what is said of anything that took too long."""


def late_reply(seconds: float, doing: str, trace: str) -> Reply:
    """Return the reply in the place of one that did not come within `seconds`."""
    reply = failed("timeout", f"no answer within {seconds:g} s", doing, trace)
    return replace(reply, message=f"{reply.message}\n{LONGER}")


def how_it_ended(code: int) -> str:
    """Return how a process with this exit status ended: ``by SIGSEGV``, ``with exit code 3``."""
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
