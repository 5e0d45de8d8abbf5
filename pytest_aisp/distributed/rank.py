"""One rank of a page that runs on several: a worker process that is started n times and joined.

    python -m pytest_aisp.distributed.rank launch SOCKET [arguments of torchrun]
    python -m pytest_aisp.distributed.rank SOCKET                     what that starts, once a rank

The first runs torch's elastic launcher; each rank connects to SOCKET, joins the others, and answers
the same tasks as a worker process does. All of them die with the process that launched them.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ..page.sources import libraries
from ..results import messages
from ..results.messages import (
    AT,
    Answer,
    CaseTask,
    ProgressUpdate,
    RankStarted,
    RankStep,
    Reply,
    StopTask,
)
from ..util import process_group
from ..util.process_group import Ranks
from ..worker.output_capture import STREAMS, OutputCapture
from ..worker.server import Server, die_with_parent, encoded, print_at_once

APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def launch(address: str, arguments: list[str]) -> None:
    """Run torch's elastic launcher on this program; dies with its parent."""
    die_with_parent()
    from torch.distributed.run import main as run

    run([*arguments, "-m", "pytest_aisp.distributed.rank", address])


def serve(address: str) -> None:
    """Connect, join the other ranks, and answer tasks until the connection closes."""
    die_with_parent()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for fd, name in enumerate(STREAMS, start=1):
        os.dup2(os.open(printed_of(os.path.dirname(address), name, rank), APPEND, 0o600), fd)
    print_at_once()
    faulthandler.enable()
    stack = open(stack_of(os.path.dirname(address), rank), "w")  # noqa: SIM115 - for ever
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)  # asked when it hangs
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rb") as tasks, connection.makefile("wb", 0) as replies:

            def say(message: Answer) -> None:
                replies.write(messages.encode(message))

            say(RankStarted(rank, os.getpid()))
            _join(rank, world, lambda number: say(RankStep(number)))
            server = Server(lambda text: say(ProgressUpdate(text)))
            say(ProgressUpdate(messages.READY))
            for line in tasks:
                task = messages.decode_task(line)
                if isinstance(task, StopTask):
                    break
                # Each launcher has drawn a seed of its own: values are those of rank 0's.
                if isinstance(task, CaseTask):
                    task = replace(task, seed=process_group.current_group().broadcast(task.seed))
                replies.write(encoded(server.answer(task)))
    os._exit(0)  # whoever is left waiting in a collective is not waited for


def printed_of(folder: str, name: str, rank: int) -> str:
    """Return the file into which `rank` prints its ``stdout`` or ``stderr``."""
    return os.path.join(folder, f"{name}-{rank}")


def stack_of(folder: str, rank: int) -> str:
    """Return the file into which `rank` writes where it stands when it gets SIGUSR1."""
    return os.path.join(folder, f"stack-{rank}")


def _join(rank: int, world: int, tell: Any) -> None:
    """Join the other ranks: NCCL where GPUs are visible, Gloo on CPUs."""
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cuda:nccl,cpu:gloo", device_id=device)
    else:
        dist.init_process_group("gloo")
    process_group.set_current_group(Ranks(rank, world, tell))


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        launch(sys.argv[2], sys.argv[3:])
    else:
        serve(sys.argv[1])


STACK_SECONDS = 0.5
"""Seconds that silent ranks get to print where they stand."""
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\w+)')
_WAITING = re.compile(
    r"/torch/distributed/|/torch/cuda/\S+\", line \d+ in synchronize"
    rf"|{re.escape(process_group.__file__)}"
)


@dataclass
class Member:
    """A rank: the connection to it, and what it has said.

    Attributes:
        step: agreements with the other ranks that it has come to.
        doing: its last word.
        reply: its answer to the task under way.
    """

    number: int
    pid: int
    connection: socket.socket
    printed: OutputCapture
    buffer: bytes = b""
    step: int = 0
    doing: str = "start"
    ready: bool = False
    gone: bool = False
    reply: Reply | None = None

    def send(self, data: bytes) -> None:
        try:
            self.connection.sendall(data)
        except OSError:
            self.gone = True

    def lines(self) -> list[bytes]:
        """Return the lines that have arrived; notes the end of the connection."""
        try:
            chunk = self.connection.recv(1 << 20)
        except OSError:
            chunk = b""
        if not chunk:
            self.gone = True
        *lines, self.buffer = (self.buffer + chunk).split(b"\n")
        return lines


def waited_for(ranks: Sequence[Member], folder: str) -> tuple[str, str]:
    """Return which of silent `ranks` the others wait for and where it stands, and its size.

    Each is asked for its stack, which it writes to its file in `folder`.
    """
    stacks = _stacks(ranks, folder)
    least = min(rank.step for rank in ranks)
    behind = [r for r in ranks if r.reply is None and r.step == least]
    if len(behind) == len(ranks):  # they have agreed as often: who is in no collective?
        behind = [r for r in ranks if not _waits(stacks[r.number])] or list(ranks)
    where = "; ".join(
        f"rank {r.number}: {r.doing.partition(AT)[0]}{_standing(stacks[r.number])}" for r in behind
    )
    others = [str(r.number) for r in ranks if r not in behind]
    if others:
        where += f"; rank {', '.join(others)} waits for it"
    return where, behind[0].doing.partition(AT)[2]


def _stacks(ranks: Sequence[Member], folder: str) -> dict[int, list[str]]:
    """Ask every rank where it stands; return the frames of each, the innermost first."""
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGUSR1)
    time.sleep(STACK_SECONDS)
    found = {}
    for rank in ranks:
        with open(stack_of(folder, rank.number)) as file:
            found[rank.number] = [line for line in file if line.startswith("  File ")]
    return found


def _waits(stack: list[str]) -> bool:
    """Return whether a rank is in a collective, or waits for its GPU to end one."""
    return bool(stack) and bool(_WAITING.search(stack[0]))


def _standing(stack: list[str]) -> str:
    """Return the innermost line that is the page's, as in ``, in summed (page_test.py:12)``."""
    for found in map(_FRAME.match, stack):
        if found and not found["file"].startswith(libraries()):
            return f", in {found['name']} ({os.path.basename(found['file'])}:{found['line']})"
    return ""
