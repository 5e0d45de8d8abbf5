"""Runs of pytest that need not import torch again: forked from a process that has done so.

A run costs seconds of imports before its first line. `Zygote` imports once and forks a process for
each run, with the arguments, environment, folder and output files that a new process would have
had. Nothing of the plugin is imported before the fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NoReturn


class Run:
    """A forked run of pytest, as `subprocess.Popen` would show it."""

    stdin = None

    def __init__(self, connection: socket.socket) -> None:
        self._answers = connection.makefile("rb")
        self._connection = connection
        self.pid = int(self._answers.readline())

    def wait(self, timeout: float | None = None) -> int:
        self._connection.settimeout(timeout)
        try:
            return int(self._answers.readline())
        except TimeoutError:
            raise subprocess.TimeoutExpired("pytest", timeout or 0.0) from None
        finally:
            self._connection.settimeout(None)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class Zygote:
    """A process that has imported torch and pytest."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def run(self, args: Sequence[str], stdout: int, stderr: int) -> Run:
        """Start `pytest args` as this process would start it, in its folder and environment."""
        asked = {"args": list(args), "cwd": os.getcwd(), "environ": dict(os.environ)}
        ours, theirs = socket.socketpair()
        with theirs:
            fds = [stdout, stderr, theirs.fileno()]
            data = json.dumps(asked).encode()
            self._socket.sendall(len(data).to_bytes(4, "big"))
            socket.send_fds(self._socket, [b"!"], fds)
            self._socket.sendall(data)
        return Run(ours)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def _serve(number: int) -> None:
    import pytest  # noqa: F401
    import torch  # noqa: F401

    with socket.socket(fileno=number) as asked:
        while head := asked.recv(4, socket.MSG_WAITALL):
            _, fds, _, _ = socket.recv_fds(asked, 1, 3)
            what = json.loads(asked.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
            if os.fork() == 0:
                asked.close()
                _supervise(what, fds)
            for fd in fds:
                os.close(fd)
            with contextlib.suppress(ChildProcessError):  # those that have ended meanwhile
                while os.waitpid(-1, os.WNOHANG) != (0, 0):
                    pass


def _supervise(what: dict[str, Any], fds: list[int]) -> None:
    """Fork the run, tell its process id, then how it ended; returns in the run alone."""
    stdout, stderr, tell = fds
    pid = os.fork()
    if pid:
        os.write(tell, b"%d\n" % pid)
        _, status = os.waitpid(pid, 0)
        os.write(tell, b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    os.close(tell)
    with open(os.devnull) as nothing:
        for fd, place in ((nothing.fileno(), 0), (stdout, 1), (stderr, 2)):
            os.dup2(fd, place)
    os.close(stdout)
    os.close(stderr)
    _become(**what)


def _become(args: list[str], cwd: str, environ: dict[str, str]) -> NoReturn:
    """Be the process that `python -m pytest args` would have started."""
    import pytest

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    random.seed()
    sys.argv = [os.path.join(os.path.dirname(pytest.__file__), "__main__.py"), *args]
    sys.path[:1] = [cwd, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    raise SystemExit(pytest.main())


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
