"""Processes that need not import torch again: forked from one that has done so.

A run of pytest costs seconds of imports before its first line, and so does each worker process that
it starts. `Zygote` imports once and forks a process for each run, with the arguments, environment,
folder and output files that a new process would have had. A run gets a zygote of its own, forked
before anything of the plugin is imported, from which its worker processes are forked in turn, so
that they die with it as ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

DIE_WITH_PARENT, SET_NAME = 1, 15
WORKER = "aisp-bench"
"""The name of a forked worker process, whose command line is another's."""
FORKED = ("PYTHONPATH", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG")
"""Variables that nothing imported here has read yet; with another one changed a process is new."""


class Forked:
    """A forked process, as `subprocess.Popen` would show it."""

    stdin = None

    def __init__(self, connection: socket.socket) -> None:
        self._answers = connection.makefile("rb")
        self._connection = connection
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("forked", timeout or 0.0)
            self.returncode = int(self._answers.readline())
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class Zygote:
    """The near end of a process that has imported torch and pytest."""

    def __init__(self, ours: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
        self._socket, self._process = ours, process

    @classmethod
    def new(cls) -> Zygote:
        """Start one."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            return cls(ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]))

    @classmethod
    def of_this_process(cls) -> Zygote:
        """Fork one that dies with this process."""
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            _prctl(DIE_WITH_PARENT, signal.SIGKILL)
            ours.close()
            _serve(theirs)
            os._exit(0)
        theirs.close()
        return cls(ours, None)

    def run(self, args: Sequence[str], stdout: int, stderr: int, *, workers: bool) -> Forked:
        """Start `pytest args` as this process would start it, in its folder and environment.

        Args:
            workers: whether its worker processes are forked, too.
        """
        fds = {1: stdout, 2: stderr}
        return self._start(fds, dict(os.environ), what="pytest", args=list(args), workers=workers)

    def bench(self, command: Sequence[str], **how: Any) -> Any:
        """Start a worker process as `subprocess.Popen(command, **how)` would."""
        kept, given = os.environ, how["env"]
        changed = {k for k in {*kept, *given} if kept.get(k) != given.get(k)}
        options = [option for option in command[1:] if option != "-P"]
        if options[:2] != ["-m", "pytest_aisp.worker"] or not changed <= set(FORKED):
            return subprocess.Popen(command, **how)
        fds = {1: how["stdout"].fileno(), 2: how["stderr"].fileno()}
        fds |= {fd: fd for fd in how["pass_fds"]}
        return self._start(fds, given, what="bench", args=options[2:])

    def _start(self, fds: Mapping[int, int], environ: Mapping[str, str], **asked: Any) -> Forked:
        asked |= {"places": list(fds), "environ": dict(environ), "cwd": os.getcwd()}
        ours, theirs = socket.socketpair()
        with theirs:
            data = json.dumps(asked).encode()
            self._socket.sendall(len(data).to_bytes(4, "big"))
            socket.send_fds(self._socket, [b"!"], [theirs.fileno(), *fds.values()])
            self._socket.sendall(data)
        return Forked(ours)

    def close(self) -> None:
        # Not only closed: a process that a failed test left behind may hold a copy.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._process is not None:
            self._process.wait()


def _serve(asked: socket.socket) -> None:
    """Fork what is asked for until the other end closes; returns in the forked process, too."""
    with asked:
        while head := asked.recv(4, socket.MSG_WAITALL):
            _, (tell, *fds), _, _ = socket.recv_fds(asked, 1, 16)
            what = json.loads(asked.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
            if os.fork() == 0:
                asked.close()
                _supervise(what, tell, fds)
            for fd in (tell, *fds):
                os.close(fd)
            with contextlib.suppress(ChildProcessError):  # those that have ended meanwhile
                while os.waitpid(-1, os.WNOHANG) != (0, 0):
                    pass


def _supervise(asked: dict[str, Any], tell: int, fds: list[int]) -> NoReturn:
    """Fork the process, tell its process id, then how it ended."""
    is_bench = asked["what"] == "bench"
    if is_bench:
        _prctl(DIE_WITH_PARENT, signal.SIGKILL)
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        os.write(tell, b"%d\n" % pid)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):
            os.write(tell, b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    os.close(tell)
    if is_bench:
        os.setsid()
    _place(fds, asked.pop("places"))
    what = asked.pop("what")
    _become(asked.pop("cwd"), asked.pop("environ"), [] if is_bench else ["."])
    (_bench if is_bench else _pytest)(**asked)
    raise AssertionError(what)


def _place(fds: list[int], places: list[int]) -> None:
    """Move each of `fds` to its place; standard input is empty."""
    above = 1 + max(*fds, *places)
    moved = [_moved(fd, above) for fd in fds]
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for fd, place in zip(moved, places, strict=True):
        os.dup2(fd, place)
        os.close(fd)


def _moved(fd: int, above: int) -> int:
    import fcntl

    copy = fcntl.fcntl(fd, fcntl.F_DUPFD, above)
    os.close(fd)
    return copy


def _become(cwd: str, environ: dict[str, str], first: list[str]) -> None:
    """Be as a new process would be, started there with these variables by `python -m`.

    Args:
        first: what that puts at the head of the path; nothing with `-P`.
    """
    import numpy as np

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    random.seed()
    np.random.seed()
    sys.path[:1] = [
        *map(os.path.abspath, first),
        *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]


def _pytest(args: list[str], workers: bool) -> NoReturn:
    import pytest

    plugins = [ForkedWorkers(Zygote.of_this_process())] if workers else []
    sys.argv = [os.path.join(os.path.dirname(pytest.__file__), "__main__.py"), *args]
    raise SystemExit(pytest.main(plugins=plugins))


class ForkedWorkers:
    """Has a run fork its worker processes."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote

    def pytest_configure(self) -> None:
        from pytest_aisp.worker import client

        client.Popen = self._zygote.bench  # type: ignore[assignment,misc]


def _bench(args: list[str]) -> NoReturn:
    from pytest_aisp.worker.server import main

    _prctl(SET_NAME, WORKER.encode())
    main(*map(int, args))
    raise SystemExit(0)


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    import pytest  # noqa: F401
    import torch  # noqa: F401

    gc.freeze()  # what every process shares is no garbage of its own
    _serve(socket.socket(fileno=int(sys.argv[1])))
