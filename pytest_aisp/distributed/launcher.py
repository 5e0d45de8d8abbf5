"""Start the ranks of a page, ask them all, and say which one is at fault.

A `RankSet` is a `Worker` of n processes: torch's elastic launcher starts them once, every task goes
to all, and rank 0's result is the answer. A rank that fails, dies or falls silent ends them all:
the others may be waiting for it in a collective for ever.
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

from msgspec.structs import replace

from ..results import messages
from ..results.messages import ProgressUpdate, RankStarted, RankStep, Reply, Task, failed
from ..worker.client import (
    START_SECONDS,
    Progress,
    describe_exit,
    timeout_reply,
    worker_environment,
)
from ..worker.output_capture import STREAMS, OutputCapture, Stream
from .rank import Member, printed_of, waited_for

AMID = ("fault", "side", "memory")
"""Errors at which a rank may have left collectives unanswered: the next page's would meet them."""
LONGEST = 100
"""Bytes of the path of a socket, of the 107 that Linux takes."""
GRACE = 3.0
"""Seconds that the others get to answer, too, once a rank has failed."""
SAID = 20
"""Lines of what ranks have printed that a failure shows."""
_EXIT = re.compile(r"rank\s*:\s*(\d+) .*\n\s*exitcode\s*:\s*(-?\d+)")


@dataclass(frozen=True)
class Nodes:
    """Where the ranks of a page that spans machines meet; each machine has a launcher.

    Attributes:
        endpoint: ``host:port``, the same on all; the first node listens there.
        count: launchers; number: which one this is, from 0.
    """

    endpoint: str
    count: int
    number: int


def _folder() -> str:
    """Return a new folder for the ranks' socket; in /tmp where TMPDIR is too long for one."""
    made = tempfile.mkdtemp(prefix="aisp-ranks-")
    if len(os.fsencode(made)) + len("/socket") <= LONGEST:
        return made
    os.rmdir(made)
    return tempfile.mkdtemp(prefix="aisp-ranks-", dir="/tmp")


def _no_job() -> dict[str, str | None]:
    """Return torchrun's own variables, removed: a job that runs pytest may have set them."""
    return {name: None for name in os.environ if name.startswith("PET_")}


def _threads(ranks: int) -> dict[str, str]:
    """Return the variable that shares the cores among `ranks`; torchrun would give each one."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}


@dataclass
class RankSet:
    """`count` ranks on this machine, started at once.

    Args:
        environment: variables to set for them; None as a value removes one.
        nodes: where they meet the ranks of other machines; None where there are none.
    """

    count: int
    environment: Mapping[str, str | None] = field(default_factory=dict)
    nodes: Nodes | None = None

    def __post_init__(self) -> None:
        self._folder = _folder()
        address = os.path.join(self._folder, "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(self.count)
        self._output = Stream()
        self._ranks: dict[int, Member] = {}
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pytest_aisp.distributed.rank",
                "launch",
                address,
                *self._arguments(),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._output.file,
            stderr=self._output.file,
            env=worker_environment({**_no_job(), **_threads(self.count), **self.environment}),
            start_new_session=True,
        )

    def _arguments(self) -> list[str]:
        """Return what torchrun is told; a rank that ends is never started again."""
        each = [f"--nproc-per-node={self.count}", "--max-restarts=0"]
        each.append(f"--log-dir={self._folder}")  # where it makes one it leaves it
        if self.nodes is None:
            return [*each, "--standalone", "--nnodes=1"]
        at = self.nodes
        return [
            *each,
            f"--nnodes={at.count}",
            f"--node-rank={at.number}",
            "--rdzv-backend=static",
            f"--rdzv-endpoint={at.endpoint}",
            "--rdzv-id=aisp",
        ]

    @property
    def alive(self) -> bool:
        """Whether they can be asked."""
        return self._process.poll() is None and not any(r.gone for r in self._ranks.values())

    @property
    def closed(self) -> bool:
        """Whether they print no more."""
        return self._output.file.closed

    @property
    def outputs(self) -> Sequence[OutputCapture]:
        """What the ranks print; their launcher's words are no page's."""
        return [rank.printed for rank in self._in_order()]

    @property
    def pids(self) -> list[int]:
        """Process ids, the launcher's first."""
        return [self._process.pid, *(rank.pid for rank in self._ranks.values())]

    def ask(self, task: Task, seconds: float, progress: Progress) -> Reply:
        """Return rank 0's reply to `task`, or what went wrong in which rank."""
        try:
            fault = self._meet(max(seconds, START_SECONDS))
            if fault is None:
                fault = self._answers(task, seconds, progress)
        except BaseException:
            self.kill()
            raise
        reply = fault or self._together()
        if reply.exhausted:
            self.kill()
        return reply

    def _meet(self, seconds: float) -> Reply | None:
        """Wait until every rank has connected and joined the others."""
        deadline = time.monotonic() + seconds
        while len(self._ranks) < self.count:
            if self._process.poll() is not None:
                return self._ended("before every rank had started")
            if time.monotonic() > deadline:
                missing = self.count - len(self._ranks)
                return self._silent(f"{missing} of {self.count} ranks did not start", seconds)
            if select.select([self._listener], [], [], 0.1)[0]:
                self._connect(self._listener.accept()[0])
        while not all(rank.ready for rank in self._ranks.values()):
            if time.monotonic() > deadline:
                return self._late(seconds)
            self._hear(0.1)
            if any(rank.gone for rank in self._ranks.values()):
                return self._ended("while the ranks joined")
        return None

    def _connect(self, connection: socket.socket) -> None:
        connection.settimeout(START_SECONDS)
        with connection.makefile("rb", 0) as file:
            line = file.readline()
        if not line:  # it has ended before its first word: the launcher ends, and says how
            connection.close()
            return
        started = messages.decode(line)
        assert isinstance(started, RankStarted)
        connection.settimeout(None)
        number = started.rank
        out, err = (printed_of(self._folder, name, number) for name in STREAMS)
        printed = OutputCapture(Stream(out), Stream(err), f"rank {number}")
        self._ranks[number] = Member(number, started.pid, connection, printed)

    def _answers(self, task: Task, seconds: float, progress: Progress) -> Reply | None:
        """Ask every rank and wait for all; None where all have a result."""
        for rank in self._ranks.values():
            rank.reply, rank.step, rank.doing = None, 0, task.kind
            rank.send(messages.encode(task))
        deadline, grace = time.monotonic() + seconds, float("inf")
        ranks = list(self._ranks.values())
        while any(rank.reply is None for rank in ranks):
            if any(rank.reply is not None and rank.reply.error for rank in ranks):
                grace = min(grace, time.monotonic() + GRACE)
            if any(rank.gone and rank.reply is None for rank in ranks):
                return self._ended(task.kind)
            if time.monotonic() > grace:
                break
            if time.monotonic() > deadline:
                return self._late(seconds)
            heard = self._hear(0.1)
            if heard:
                deadline = time.monotonic() + seconds  # the limit is on silence, not on long work
                progress(heard[-1])
        return self._failed()

    def _hear(self, seconds: float) -> list[str]:
        """Take what ranks have said within `seconds`; return what they do now."""
        listening = {r.connection: r for r in self._ranks.values() if not r.gone}
        heard = []
        for connection in select.select(list(listening), [], [], seconds)[0]:
            rank = listening[connection]
            for line in rank.lines():
                answer = messages.decode(line)
                if isinstance(answer, RankStep):
                    rank.step = answer.number
                elif isinstance(answer, Reply):
                    rank.reply = answer
                elif isinstance(answer, ProgressUpdate) and answer.text == messages.READY:
                    rank.ready = True
                elif isinstance(answer, ProgressUpdate):
                    rank.doing = answer.text
                    heard.append(rank.doing)
        return heard

    def _failed(self) -> Reply | None:
        """Return the failure of the ranks that have one, named where not all have it."""
        failed = [r for r in self._in_order() if r.reply is not None and r.reply.error]
        if not failed:
            return None
        first = failed[0]
        assert first.reply is not None
        said = {rank.reply.message for rank in failed if rank.reply is not None}
        everyone = len(failed) == self.count
        if not everyone or any(r.reply and r.reply.error in AMID for r in failed):
            self.kill()  # the others wait for what will never come
        if everyone and len(said) == 1:
            return first.reply
        names = " and ".join(str(rank.number) for rank in failed)
        others = f"\n(ranks {names} failed; this is rank {first.number})" * (len(failed) > 1)
        message = f"rank {first.number}: {first.reply.message}{others}"
        return replace(first.reply, message=message)

    def _together(self) -> Reply:
        """Return rank 0's result, with the worst errors of all ranks."""
        replies = [rank.reply for rank in self._in_order() if rank.reply is not None]
        results = [dict(reply.result) for reply in replies]
        found = results[0]
        if "errors" in found:
            found["errors"] = {
                name: max(result["errors"].get(name, 0.0) for result in results)
                for name in found["errors"]
            }
        return Reply(result=found, exhausted=any(reply.exhausted for reply in replies))

    def _in_order(self) -> list[Member]:
        return [self._ranks[number] for number in sorted(self._ranks)]

    def _ended(self, when: str) -> Reply:
        """Return which rank has ended and how, as far as the launcher knows."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)  # it tells how a rank has ended when it has ended the others
        gone = [rank for rank in self._in_order() if rank.gone]
        codes = {int(rank): int(code) for rank, code in _EXIT.findall(self._output.peek().text)}
        culprit = next((r for r in gone if r.number in codes), gone[0] if gone else None)
        self.kill()
        if culprit is None:
            how = f"the ranks' launcher ended {when}"
            return Reply(error="died", message=how, trace=self.output())
        code = codes.get(culprit.number)
        how = "" if code is None else f" {describe_exit(code)}"
        trace = "\n".join(culprit.printed.last(SAID)) or self.output()
        return failed("died", f"rank {culprit.number} ended{how}", culprit.doing, trace)

    def _late(self, seconds: float) -> Reply:
        """Return which rank the others wait for, and where it stands."""
        where, at = waited_for(self._in_order(), self._folder)
        return replace(self._silent(where, seconds), at=at)

    def _silent(self, where: str, seconds: float) -> Reply:
        self.kill()
        return timeout_reply(seconds, where, self.output())

    def output(self) -> str:
        """Return the last lines that each rank printed; their launcher's, where none did."""
        said = [
            f"{printed.label}: {line}"
            for printed in self.outputs
            for line in printed.last(SAID // self.count)
        ]
        return "\n".join(said or self._output.peek().lines()[-SAID:])

    def kill(self) -> None:
        """Kill every rank and the launcher: torchrun gives each a session of its own."""
        for rank in self._ranks.values():
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)  # and what it has started
            rank.gone = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End the ranks and release their connections."""
        self.kill()
        for rank in self._ranks.values():
            rank.connection.close()
            rank.printed.close()
        self._listener.close()
        self._output.file.close()
        shutil.rmtree(self._folder, ignore_errors=True)
