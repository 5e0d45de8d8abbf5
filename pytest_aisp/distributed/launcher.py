"""Start the ranks of a page, send tasks to all of them, and name the rank that failed.

A `RankSet` is a `Worker` that consists of n processes. torch's elastic launcher starts them once.
Each task is sent to all ranks, and rank 0's reply is used. If a rank fails, dies, or stops
responding, all ranks are killed, because the others may wait for it in a collective forever.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from subprocess import Popen

from msgspec.structs import replace

from ..results import encoding, messages
from ..results.messages import (
    ProgressUpdate,
    RankStarted,
    RankStep,
    Reply,
    Task,
    failed,
    timeout_reply,
)
from ..worker.client import START_SECONDS, Progress, describe_exit, worker_environment
from ..worker.output_capture import STREAMS, OutputCapture, Stream
from .rank import Member, describe_hang, output_file

ERRORS_IN_COLLECTIVES = ("fault", "side", "memory")
"""Errors after which a collective may still be pending, which would disturb the next page."""
MAX_FOLDER = 93
"""The maximum length of the folder's path in bytes. Linux allows 107 bytes for a socket's path."""
GRACE_SECONDS = 3.0
"""Seconds that the other ranks have to reply after one rank has failed."""
OUTPUT_LINES = 20
"""The maximum number of lines of the ranks' output in a failure message."""
LOST_HINT = "See what the launcher of that machine says: the rank or the machine has failed"
_CONNECTION_LOST = re.compile("Connection (closed|reset) by peer|ncclRemoteError")
_EXIT = re.compile(r"rank\s*:\s*(\d+) .*\n\s*exitcode\s*:\s*(-?\d+)")


@dataclass(frozen=True)
class Nodes:
    """The endpoint at which the ranks of several machines meet. Each machine runs one launcher.

    Attributes:
        endpoint: ``host:port``, the same on all machines. The first machine listens there.
        count: the number of launchers.
        number: the number of this launcher, counted from 0.
    """

    endpoint: str
    count: int
    number: int


@dataclass
class RankSet:
    """`count` ranks on this machine. Creating the object starts the ranks.

    Args:
        environment: variables to set for the ranks. A variable with the value None is removed.
        nodes: the endpoint where these ranks meet the ranks of other machines, or None.
    """

    count: int
    environment: Mapping[str, str | None] = field(default_factory=dict)
    nodes: Nodes | None = None

    def __post_init__(self) -> None:
        self._folder = _new_folder()
        address = os.path.join(self._folder, "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(self.count)
        self._output = Stream()
        self._ranks: dict[int, Member] = {}
        command = [sys.executable, "-m", "pytest_aisp.distributed.rank", "launch", address]
        self._process = Popen(
            [*command, *self._arguments()],
            stdin=subprocess.DEVNULL,
            stdout=self._output.file,
            stderr=self._output.file,
            env=worker_environment({**_launcher_variables(self.count), **self.environment}),
            start_new_session=True,
        )

    def _arguments(self) -> list[str]:
        """Return torchrun's arguments, which disable restarts of ranks."""
        arguments = [f"--nproc-per-node={self.count}", "--max-restarts=0"]
        arguments.append(f"--log-dir={self._folder}")  # torchrun's own folder would be left behind
        if self.nodes is None:
            return [*arguments, "--standalone", "--nnodes=1"]
        return [
            *arguments,
            f"--nnodes={self.nodes.count}",
            f"--node-rank={self.nodes.number}",
            "--rdzv-backend=static",
            f"--rdzv-endpoint={self.nodes.endpoint}",
            "--rdzv-id=aisp",
        ]

    @property
    def alive(self) -> bool:
        """True if the ranks can accept tasks."""
        return self._process.poll() is None and not any(r.closed for r in self._ranks.values())

    @property
    def closed(self) -> bool:
        """True if the launcher's output is closed."""
        return self._output.file.closed

    @property
    def outputs(self) -> Sequence[OutputCapture]:
        """The output of each rank, without the launcher's own output."""
        return [rank.output for rank in self._in_order()]

    @property
    def pids(self) -> list[int]:
        """The process ids of the launcher and of the ranks, in this order."""
        return [self._process.pid, *(rank.pid for rank in self._ranks.values())]

    def ask(self, task: Task, seconds: float, progress: Progress) -> Reply:
        """Send `task` to all ranks, and return rank 0's reply, or the failure of a rank."""
        try:
            failure = self._wait_for_start(max(seconds, START_SECONDS))
            if failure is None:
                failure = self._collect_replies(task, seconds, progress)
        except BaseException:
            self.kill()
            raise
        replies = [rank.reply for rank in self._in_order() if rank.reply is not None]
        reply = failure or merged(replies)
        if reply.exhausted:
            self.kill()
        return reply

    def _wait_for_start(self, seconds: float) -> Reply | None:
        """Wait until every rank has connected and joined the others."""
        deadline = time.monotonic() + seconds
        while len(self._ranks) < self.count:
            if self._process.poll() is not None:
                return self._died("before every rank had started")
            if time.monotonic() > deadline:
                missing = self.count - len(self._ranks)
                what = f"{missing} of {self.count} ranks did not start{self._waits_for_machines()}"
                return self._timed_out(what, seconds)
            if select.select([self._listener], [], [], 0.1)[0]:
                self._accept(self._listener.accept()[0])
        while not all(rank.ready for rank in self._ranks.values()):
            if time.monotonic() > deadline:
                return self._hung(seconds)
            self._receive(0.1)
            if any(rank.closed for rank in self._ranks.values()):
                return self._died("while the ranks joined")
        return None

    def _waits_for_machines(self) -> str:
        """Return a message about the machines that torchrun waits for before it starts any rank."""
        if self.nodes is None or self._ranks:
            return ""
        nodes = self.nodes
        return (
            f"; launcher {nodes.number} waits until the launchers of all {nodes.count} machines"
            f" (0 to {nodes.count - 1}) reach {nodes.endpoint}"
        )

    def _accept(self, connection: socket.socket) -> None:
        connection.settimeout(START_SECONDS)
        with connection.makefile("rb", 0) as file:
            line = file.readline()
        if not line:  # the rank has died; the launcher reports the cause when it exits
            connection.close()
            return
        started = encoding.decode(line)
        assert isinstance(started, RankStarted)
        connection.settimeout(None)
        number = started.rank
        out, err = (output_file(self._folder, name, number) for name in STREAMS)
        output = OutputCapture(Stream(out), Stream(err), f"rank {number}")
        self._ranks[number] = Member(number, started.pid, connection, output)

    def _collect_replies(self, task: Task, seconds: float, progress: Progress) -> Reply | None:
        """Send `task` to every rank and wait for all replies. Return a failure, or None."""
        ranks = list(self._ranks.values())
        for rank in ranks:
            rank.reply, rank.step, rank.doing = None, 0, task.kind
            rank.send(encoding.encode(task))
        deadline, grace_ends = time.monotonic() + seconds, float("inf")
        while any(rank.reply is None for rank in ranks):
            if any(rank.failed for rank in ranks):
                grace_ends = min(grace_ends, time.monotonic() + GRACE_SECONDS)
            if any(rank.closed and rank.reply is None for rank in ranks):
                return self._died(task.kind)
            if time.monotonic() > grace_ends:
                break
            if time.monotonic() > deadline:
                return self._hung(seconds)
            updates = self._receive(0.1)
            if updates:
                deadline = time.monotonic() + seconds  # each message restarts the time limit
                progress(updates[-1])
        return self._failure()

    def _receive(self, seconds: float) -> list[str]:
        """Read the messages that arrive within `seconds`, and return the progress texts in them."""
        open_ranks = {r.connection: r for r in self._ranks.values() if not r.closed}
        updates = []
        for connection in select.select(list(open_ranks), [], [], seconds)[0]:
            rank = open_ranks[connection]
            for line in rank.lines():
                message = encoding.decode(line)
                if isinstance(message, RankStep):
                    rank.step = message.number
                elif isinstance(message, Reply):
                    rank.reply = message
                elif isinstance(message, ProgressUpdate) and message.text == messages.READY:
                    rank.ready = True
                elif isinstance(message, ProgressUpdate):
                    rank.doing = message.text
                    updates.append(message.text)
        return updates

    def _failure(self) -> Reply | None:
        """Return the first failed rank's reply, or None if no rank has failed.

        The message names the rank, unless all ranks failed with the same message.
        """
        failed_ranks = [rank for rank in self._in_order() if rank.failed]
        failures = [rank.reply for rank in failed_ranks if rank.reply is not None]
        if not failures:
            return None
        all_failed = self.nodes is None and len(failures) == self.count
        if not all_failed or any(reply.error in ERRORS_IN_COLLECTIVES for reply in failures):
            self.kill()  # a rank may wait for a collective that will never complete
        first, number = failures[0], failed_ranks[0].number
        if self.nodes is not None and _CONNECTION_LOST.search(first.message):
            self.kill()
            trace = f"{first.message}\n{first.trace}"
            message = f"rank {number} lost its connection to a rank of another machine\n{LOST_HINT}"
            return replace(first, error="died", message=message, trace=trace)
        if all_failed and len({reply.message for reply in failures}) == 1:
            return first
        message = f"rank {number}: {first.message}"
        if len(failures) > 1:
            names = " and ".join(str(rank.number) for rank in failed_ranks)
            message += f"\n(ranks {names} failed; this is rank {number})"
        return replace(first, message=message)

    def _in_order(self) -> list[Member]:
        return [self._ranks[number] for number in sorted(self._ranks)]

    def _died(self, when: str) -> Reply:
        """Return a reply that names the rank that has ended, with the cause if it is known."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)  # the launcher reports after all ranks have ended
        closed = [rank for rank in self._in_order() if rank.closed]
        codes = {int(rank): int(code) for rank, code in _EXIT.findall(self._output.peek().text)}
        culprit = next((r for r in closed if r.number in codes), closed[0] if closed else None)
        self.kill()
        if culprit is None:
            message = f"the ranks' launcher ended {when}"
            return Reply(error="died", message=message, trace=self.output())
        code = codes.get(culprit.number)
        how = "" if code is None else f" {describe_exit(code)}"
        trace = "\n".join(culprit.output.last(OUTPUT_LINES)) or self.output()
        return failed("died", f"rank {culprit.number} ended{how}", culprit.doing, trace)

    def _hung(self, seconds: float) -> Reply:
        """Return a reply that names the rank that the others wait for, and the line it is at."""
        description, size = describe_hang(self._in_order(), self._folder)
        return replace(self._timed_out(description, seconds), at=size)

    def _timed_out(self, description: str, seconds: float) -> Reply:
        self.kill()
        return timeout_reply(seconds, description, self.output())

    def output(self) -> str:
        """Return the last lines of each rank's output, or the launcher's if there are none."""
        lines = [
            f"{output.label}: {line}"
            for output in self.outputs
            for line in output.last(OUTPUT_LINES // self.count)
        ]
        return "\n".join(lines or self._output.peek().lines()[-OUTPUT_LINES:])

    def kill(self) -> None:
        """Kill every rank and the launcher. Every rank and the launcher have their own session."""
        for rank in self._ranks.values():
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)  # also kills the processes that it has started
            rank.closed = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End the ranks and release their connections."""
        self.kill()
        for rank in self._ranks.values():
            rank.connection.close()
            rank.output.close()
        self._listener.close()
        self._output.file.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def merged(replies: Sequence[Reply]) -> Reply:
    """Return the first rank's result, but with the largest error that any rank measured."""
    results = [reply.result for reply in replies]
    first = dict(results[0])
    if "errors" in first:
        first["errors"] = {
            name: max(result["errors"].get(name, 0.0) for result in results)
            for name in first["errors"]
        }
    return Reply(result=first, exhausted=any(reply.exhausted for reply in replies))


def _new_folder() -> str:
    """Create and return a folder for the ranks' socket, in /tmp if TMPDIR is too long."""
    folder = tempfile.mkdtemp(prefix="aisp-ranks-")
    if len(os.fsencode(folder)) <= MAX_FOLDER:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix="aisp-ranks-", dir="/tmp")


def _launcher_variables(ranks: int) -> dict[str, str | None]:
    """Return the variables to change for the ranks; None means remove.

    Variables of a surrounding torchrun job are removed, and the ranks divide the cores among them.
    """
    changes: dict[str, str | None] = {name: None for name in os.environ if name.startswith("PET_")}
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun would give each rank one thread
        changes["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    return changes
