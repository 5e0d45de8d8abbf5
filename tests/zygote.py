"""Processes that are forked from one that has imported torch, and so start without importing it.

A run of pytest spends seconds on imports before its first line, and so does each of its worker
processes. `Zygote` imports once and forks a process for each run, with the arguments, environment,
folder and output files that a new process would have. The worker processes of a run are forked from
a zygote of its own, which has imported the worker's modules and ends with the run. So are the xdist
workers of a run with `-n`, and their worker processes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
WORKER_NAME, SERVER_NAME = "aisp-worker", "aisp-server"
"""The names of a forked worker process and rank server. Their command line is their zygote's."""
WORKERS, RUNS, COMPILERS = 63, 62, 61
"""File descriptors: a run's sockets to the zygotes of its worker processes, of its xdist workers,
and of worker processes that compile kernels.
"""
FORKABLE = {
    "AISP_CUDA_EMULATOR",
    "PYTEST_AISP_EMULATOR_SEED",
    "PYTHONPATH",
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "TRITON_INTERPRET",
}
"""Variables that nothing imported here has read. If another one changes, the process is new."""
RUN_MODULES = (
    "hypothesis",
    "numpy.random",
    "pytest_aisp.kernels.cross_compile",
    "pytest_aisp.session.collect",
    "pytest_aisp.session.pair_fixture",
    "pytest_aisp.session.startup",
    "xdist.dsession",
)
"""What every run of the plugin's tests imports beside its plugins."""
WORKER_MODULES = ("pytest_aisp.distributed.rank", "pytest_aisp.worker.server")
COMPILER_MODULES = (
    *WORKER_MODULES,
    "cuda.core",
    "pytest_aisp.kernels.cross_compile",
    "torch._dynamo",
    "triton.experimental.gluon",
)
"""What a worker process that compiles kernels imports in seconds."""


class Forked:
    """A forked process with the interface of `subprocess.Popen`."""

    stdin: Any = None
    stdout: Any = None

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lines = connection, connection.makefile("rb")
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("forked", timeout or 0.0)
            with self._lock:  # another thread may have waited, too
                if self.returncode is None:
                    self.returncode = int(self._lines.readline())
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Zygote:
    """The connection to a process that has imported torch and pytest."""

    def __init__(
        self,
        connection: socket.socket,
        process: subprocess.Popen[bytes] | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        self._connection, self._process = connection, process
        reads = {"TRITON_INTERPRET"} if "torch._dynamo" in modules else set()  # it imports triton
        self._forkable = FORKABLE - reads

    @classmethod
    def new(cls, *modules: str, without: str = "CI") -> Zygote:
        """Start a zygote that also imports `modules`, and pytest's plugins with `RUN_MODULES`.

        Args:
            without: a variable that the zygote's environment lacks, besides `CI`.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), *modules]
            # hypothesis reads CI when it is imported. Most tests unset CI.
            environ = {
                name: value for name, value in os.environ.items() if name not in ("CI", without)
            }
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environ)
            return cls(ours, process, modules)

    def run(
        self,
        args: Sequence[str],
        stdout: int,
        stderr: int,
        workers: Zygote | None = None,
        compilers: Zygote | None = None,
    ) -> Forked:
        """Start `pytest args` as this process would start it, in its folder and environment.

        Args:
            workers: the zygote whose copy starts the worker processes of this run.
            compilers: the zygote whose copy starts those without Triton's interpreter.
        """
        fds = {1: stdout, 2: stderr}
        if workers is None:
            return self._start(fds, os.environ, target="pytest", args=args)
        with contextlib.ExitStack() as sockets:
            fds[WORKERS] = workers._copy(sockets)
            if any(argument.startswith("-n") for argument in args):
                fds[RUNS] = self._copy(sockets)
            if compilers is not None:
                fds[COMPILERS] = compilers._copy(sockets)
            given = sorted(set(fds) - {1, 2})
            return self._start(fds, os.environ, target="pytest", args=args, sockets=given)

    def xdist_worker(self, workers: Zygote, compilers: Zygote | None) -> Forked:
        """Start the process that execnet starts for an xdist worker, with pipes to it."""
        (stdin, to_stdin), (from_stdout, stdout) = os.pipe(), os.pipe()
        with contextlib.ExitStack() as sockets:
            fds = {0: stdin, 1: stdout, 2: 2, WORKERS: workers._copy(sockets)}
            if compilers is not None:
                fds[COMPILERS] = compilers._copy(sockets)
            given = sorted(set(fds) - {0, 1, 2})
            forked = self._start(fds, os.environ, target="xdist_worker", sockets=given)
        os.close(stdin)
        os.close(stdout)
        forked.stdin, forked.stdout = os.fdopen(to_stdin, "wb"), os.fdopen(from_stdout, "rb")
        return forked

    def _copy(self, sockets: contextlib.ExitStack) -> int:
        """Fork a zygote from this one. Return the file descriptor of a socket to it."""
        ours, theirs = map(sockets.enter_context, socket.socketpair())
        self._start({WORKERS: theirs.fileno()}, os.environ, target="zygote")
        return ours.fileno()

    def worker(self, command: Sequence[str], **options: Any) -> Any:
        """Start a worker process as `subprocess.Popen(command, **options)` would."""
        arguments = [argument for argument in command[1:] if argument != "-P"]
        if arguments[:2] != ["-m", "pytest_aisp.worker"] or not self._can_fork(options["env"]):
            return subprocess.Popen(command, **options)
        fds = {1: options["stdout"].fileno(), 2: options["stderr"].fileno()}
        fds |= {fd: fd for fd in options["pass_fds"]}
        return self._start(fds, options["env"], target="worker", args=arguments[2:])

    def launcher(self, command: Sequence[str], **options: Any) -> Any:
        """Start torch's elastic launcher, which forks its ranks from a copy of this zygote."""
        if not self._can_fork(options["env"], "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
            return subprocess.Popen(command, **options)
        with contextlib.ExitStack() as sockets:
            fds = {1: options["stdout"].fileno(), 2: options["stderr"].fileno()}
            fds[WORKERS] = self._copy(sockets)
            return self._start(fds, options["env"], target="launcher", args=command[4:])

    def rank_server(self, command: Sequence[str], **options: Any) -> Forked:
        """Start a node's rank server, whose ranks are forked from a copy of this zygote."""
        with contextlib.ExitStack() as sockets:
            fds = {fd: fd for fd in (1, 2, *options["pass_fds"])}
            fds[WORKERS] = self._copy(sockets)
            request = {"target": "rank_server", "args": command[3:4], "cwd": options["cwd"]}
            return self._start(fds, options["env"], **request)

    def rank(self, args: Sequence[str], env: Mapping[str, str], **_: Any) -> Forked:
        """Start a rank as torch's elastic launcher does."""
        return self._start({1: 1, 2: 2}, env, target="rank", args=args[-1:])

    def _can_fork(self, environ: Mapping[str, str], *ours: str) -> bool:
        names = {*os.environ, *environ}
        changed = {name for name in names if os.environ.get(name) != environ.get(name)}
        return changed <= self._forkable.union(ours)

    def _start(self, fds: Mapping[int, int], environ: Mapping[str, str], **request: Any) -> Forked:
        where = {"cwd": os.getcwd()}
        request = {**where, **request, "targets": list(fds), "environ": dict(environ)}
        ours, theirs = socket.socketpair()
        with theirs:
            data = json.dumps(request).encode()
            self._connection.sendall(len(data).to_bytes(4, "big"))
            socket.send_fds(self._connection, [b"!"], [theirs.fileno(), *fds.values()])
            self._connection.sendall(data)
        return Forked(ours)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a leaked process may hold a copy of the socket
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        if self._process is not None:
            self._process.wait()


def _serve(requests: socket.socket) -> None:
    """Fork a process for each request until the other end closes."""
    with requests:
        while head := requests.recv(4, socket.MSG_WAITALL):
            _, (reply, *fds), _, _ = socket.recv_fds(requests, 1, 16)
            request = json.loads(requests.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
            if os.fork() == 0:
                requests.close()
                _supervise(request, reply, fds)
            for fd in (reply, *fds):
                os.close(fd)
            with contextlib.suppress(ChildProcessError):  # reap the processes that have ended
                while os.waitpid(-1, os.WNOHANG) != (0, 0):
                    pass


def _supervise(request: dict[str, Any], reply: int, fds: list[int]) -> NoReturn:
    """Fork the process; send its process id, then its exit code."""
    target = request.pop("target")
    is_worker = target in ("worker", "launcher", "rank", "rank_server")
    if is_worker:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):
            os.write(reply, b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    if is_worker:
        os.setsid()  # first: whoever knows the process id may kill the process group
    os.write(reply, b"%d\n" % os.getpid())
    os.close(reply)
    _move(fds, request.pop("targets"))
    _set_up(request.pop("cwd"), request.pop("environ"), is_worker)
    {
        "pytest": _run_pytest,
        "xdist_worker": _run_xdist_worker,
        "worker": _run_worker,
        "launcher": _run_launcher,
        "rank_server": _run_rank_server,
        "rank": _run_rank,
        "zygote": _run_zygote,
    }[target](**request)
    raise AssertionError("the process returned")


def _move(fds: list[int], targets: list[int]) -> None:
    """Move each of `fds` to its target number; standard input becomes empty."""
    above = 1 + max(*fds, *targets)
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
    for fd in fds:
        os.close(fd)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for copy, target in zip(copies, targets, strict=True):
        os.dup2(copy, target)
        os.close(copy)


def _set_up(cwd: str, environ: dict[str, str], is_worker: bool) -> None:
    """Give this process the state of a new `python -m`; a worker has no folder on its path."""
    import numpy as np

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    random.seed()
    np.random.seed()
    first = [] if is_worker else [os.getcwd()]
    sys.path[:1] = [*first, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")  # as a new process does when it starts


def _run_zygote() -> NoReturn:
    _serve(socket.socket(fileno=WORKERS))
    os._exit(0)


def _run_pytest(args: list[str], sockets: Sequence[int] = ()) -> NoReturn:
    import pytest

    plugins = [ForkWorkers(sockets)] if sockets else []
    sys.argv = [os.path.join(os.path.dirname(pytest.__file__), "__main__.py"), *args]
    _end(int(pytest.main(plugins=plugins)))


def _run_xdist_worker(sockets: Sequence[int]) -> NoReturn:
    import _pytest.config

    plugin = ForkWorkers(sockets)
    prepare = _pytest.config._prepareconfig
    _pytest.config._prepareconfig = lambda args, _: prepare(args, [plugin])
    sys.argv, sys.stdin = ["-c"], os.fdopen(0, closefd=False)
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})  # execnet's command
    _end(0)


class ForkWorkers:
    """A plugin that forks the worker processes of a run, and its xdist workers."""

    def __init__(self, sockets: Sequence[int]) -> None:
        zygotes = {fd: Zygote(socket.socket(fileno=fd)) for fd in sockets}
        self._workers, self._runs = zygotes[WORKERS], zygotes.get(RUNS)
        self._compilers = zygotes.get(COMPILERS)

    def pytest_configure(self) -> None:
        from pytest_aisp.distributed import launcher
        from pytest_aisp.worker import client

        client.Popen = self._worker  # type: ignore[assignment,misc]
        launcher.Popen = self._workers.launcher  # type: ignore[assignment,misc]
        if runs := self._runs:
            from execnet import gateway_io

            def start(io: Any, args: Sequence[str], execmodel: Any) -> None:
                io.popen = runs.xdist_worker(self._workers, self._compilers)
                super(type(io), io).__init__(io.popen.stdin, io.popen.stdout, execmodel)

            gateway_io.Popen2IOMaster.__init__ = start  # type: ignore[assignment,method-assign]

    def _worker(self, command: Sequence[str], **options: Any) -> Any:
        compiles = self._compilers is not None and "TRITON_INTERPRET" not in options["env"]
        zygote = self._compilers if compiles else self._workers
        return zygote.worker(command, **options)  # type: ignore[union-attr]


def _run_worker(args: list[str]) -> NoReturn:
    from pytest_aisp.worker.server import main

    _prctl(PR_SET_NAME, WORKER_NAME.encode())
    main(*map(int, args))
    _end(0)


def _run_launcher(args: list[str]) -> NoReturn:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from pytest_aisp.distributed import rank

    _prctl(PR_SET_NAME, WORKER_NAME.encode())
    ranks = Zygote(socket.socket(fileno=WORKERS))
    subprocess_handler.Popen = lambda args, **options: ranks.rank(args, **options)
    rank.launch(args[0], args[1:])
    _end(0)


def _run_rank_server(args: list[str]) -> NoReturn:
    from pytest_aisp.distributed import launcher
    from pytest_aisp.fleet import rank_server

    launcher.Popen = Zygote(socket.socket(fileno=WORKERS)).launcher  # type: ignore[assignment,misc]
    _prctl(PR_SET_NAME, SERVER_NAME.encode())
    rank_server.main(int(args[0]), os.getppid())
    _end(0)


def _run_rank(args: list[str]) -> NoReturn:
    import torch

    from pytest_aisp.distributed import rank

    _prctl(PR_SET_NAME, WORKER_NAME.encode())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # OpenMP read it before the fork
    rank.serve(args[0])
    _end(0)


def _end(code: int) -> NoReturn:
    """End this process as Python does, but keep its objects: to free them all takes 0.3 s."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a run may have closed or replaced it
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


def _import_plugins() -> None:
    """Import pytest's plugins and `RUN_MODULES` as a run does: with rewritten assertions."""
    from _pytest.config import _prepareconfig

    config = _prepareconfig(["-c", os.devnull, "--noconftest", "-p", "no:benchmark"])
    for name in RUN_MODULES:
        importlib.import_module(name)
    config._ensure_unconfigure()


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    import pytest  # noqa: F401
    import torch  # noqa: F401

    if sys.argv[2:] == [*RUN_MODULES]:
        _import_plugins()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    if {*WORKER_MODULES} <= {*sys.argv}:  # each worker process would need 20 ms for this
        sys.modules["pytest_aisp.isolation.monkeypatches"].remember()
    if {*COMPILER_MODULES} <= {*sys.argv}:  # and 2 s for the hash of Triton's library
        sys.modules["triton.runtime.cache"].triton_key()
    gc.freeze()  # the objects that all processes share are never garbage
    _serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # at a regular exit, triton's binding prints what it leaks
