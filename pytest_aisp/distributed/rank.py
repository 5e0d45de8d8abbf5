"""One rank of a page that runs on several ranks. A rank is a worker process that joins the others.

    python -m pytest_aisp.distributed.rank launch SOCKET [arguments of torchrun]
    python -m pytest_aisp.distributed.rank SOCKET
    python -m pytest_aisp.distributed.rank profile TASK.json RANKS

The first command runs torch's elastic launcher, which starts the second command for each rank. A
rank connects to SOCKET, joins the other ranks, and answers the same tasks as a worker process. If
the process that launched the ranks dies, all ranks die too. The third command is for Nsight
Compute: it runs the task in a file as rank 0 and starts the other ranks beside it.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

from msgspec.structs import replace

from ..page.sources import libraries
from ..results import encoding, messages
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
from ..worker.client import interpreter
from ..worker.output_capture import STREAMS, OutputCapture
from ..worker.server import Server, die_with_parent, encode_reply, print_at_once

APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
STACK_SECONDS = 0.5
"""Ranks that have stopped responding get this many seconds to write their stacks."""
FIRST_SECONDS = 3.0
"""Rank 0 waits this many seconds before it reports an error. If another rank has failed first, this
process ends meanwhile (`_end_with`), and only the first error is shown."""
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\w+)')
_WAITING = re.compile(
    r"/torch/distributed/|/torch/cuda/\S+\", line \d+ in synchronize"
    rf"|{re.escape(process_group.__file__)}"
)


def launch(address: str, arguments: list[str]) -> None:
    """Run torch's elastic launcher on this program. If the parent process dies, die too."""
    die_with_parent()
    from torch.distributed.run import main

    main([*arguments, "-m", "pytest_aisp.distributed.rank", address])


def serve(address: str) -> None:
    """Connect, join the other ranks, and answer tasks until the connection closes."""
    die_with_parent()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = os.path.dirname(address)
    for fd, name in enumerate(STREAMS, start=1):
        os.dup2(os.open(output_file(folder, name, rank), APPEND, 0o600), fd)
    print_at_once()
    faulthandler.enable()
    stack = open(_stack_file(folder, rank), "w")  # noqa: SIM115 - open until the process ends
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rb") as tasks, connection.makefile("wb", 0) as replies:

            def send(message: Answer) -> None:
                replies.write(encoding.encode(message))

            send(RankStarted(rank, os.getpid()))
            _join(rank, world, lambda number: send(RankStep(number)))
            server = Server(lambda text: send(ProgressUpdate(text)))
            send(ProgressUpdate(messages.READY))
            for line in tasks:
                task = encoding.decode_task(line)
                if isinstance(task, StopTask):
                    break
                # Each machine's launcher has drawn its own seed, so all ranks use the seed of rank
                # 0.
                if isinstance(task, CaseTask):
                    task = replace(task, seed=process_group.current_group().broadcast(task.seed))
                replies.write(encode_reply(server.answer(task)))
    os._exit(0)  # do not wait for threads that are stuck in a collective


def profile(path: str, world: int) -> None:
    """Run the task in the file `path` as rank 0, beside the other ranks, which are child processes.

    Nsight Compute profiles only this process. It runs the process once for each of its passes, and
    each time all ranks are new. If a rank fails, this process ends with exit code 1.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # As under torchrun, the store exists before the ranks join, and they are its clients.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    command = [*interpreter(), "-m", "pytest_aisp.distributed.rank", "beside", path, str(world)]
    others = [Popen([*command, str(rank)]) for rank in range(1, world)]
    for process in others:
        threading.Thread(target=_end_with, args=[process], daemon=True).start()
    run_file(path, world, 0)
    for process in others:
        process.wait()


def _end_with(process: Popen[bytes]) -> None:
    """End this process if `process` fails, because this rank may wait for it in a collective."""
    if process.wait():
        os._exit(1)


def run_file(path: str, world: int, rank: int) -> None:
    """Join the other ranks, run the task in the file `path`, and leave the other ranks."""
    import torch.distributed as dist

    faulthandler.enable()
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    _join(rank, world, lambda number: None)
    task = encoding.decode_task(Path(path).read_bytes())
    reply = Server(lambda text: None).answer(task)
    if reply.error is not None:
        if rank == 0:
            time.sleep(FIRST_SECONDS)
        sys.stderr.write(f"{reply.trace}rank {rank}: {reply.message}\n")
        sys.stderr.flush()
        os._exit(1)  # do not wait for a collective that will never complete
    dist.destroy_process_group()


def output_file(folder: str, name: str, rank: int) -> str:
    """Return the file that holds the ``stdout`` or ``stderr`` of `rank`."""
    return os.path.join(folder, f"{name}-{rank}")


def _stack_file(folder: str, rank: int) -> str:
    """Return the file to which `rank` writes its stack when it receives SIGUSR1."""
    return os.path.join(folder, f"stack-{rank}")


def _join(rank: int, world: int, tell: Callable[[int], object]) -> None:
    """Join the other ranks with NCCL if GPUs are visible, or with Gloo if not."""
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cuda:nccl,cpu:gloo", device_id=device)
    else:
        dist.init_process_group("gloo")
    process_group.set_current_group(Ranks(rank, world, tell))


@dataclass
class Member:
    """The launcher's view of a rank: the connection, and the messages from the rank.

    Attributes:
        step: the number of times that the rank has synchronized with the other ranks.
        doing: the text of the rank's last progress message.
        reply: the rank's reply to the current task, or None.
        closed: True if the connection has ended.
    """

    number: int
    pid: int
    connection: socket.socket
    output: OutputCapture
    buffer: bytes = b""
    step: int = 0
    doing: str = "start"
    ready: bool = False
    closed: bool = False
    reply: Reply | None = None

    @property
    def failed(self) -> bool:
        """True if the rank has replied with an error."""
        return self.reply is not None and bool(self.reply.error)

    def send(self, data: bytes) -> None:
        try:
            self.connection.sendall(data)
        except OSError:
            self.closed = True

    def lines(self) -> list[bytes]:
        """Return the lines that have arrived. Set `closed` if the connection has ended."""
        try:
            chunk = self.connection.recv(1 << 20)
        except OSError:
            chunk = b""
        if not chunk:
            self.closed = True
        *lines, self.buffer = (self.buffer + chunk).split(b"\n")
        return lines


def describe_hang(ranks: Sequence[Member], folder: str) -> tuple[str, str]:
    """Return a description of the hang, and the size that was being measured.

    The description names the rank that all others wait for, and the line of the page that this rank
    runs.
    """
    stacks = _read_stacks(ranks, folder)
    fewest = min(rank.step for rank in ranks)
    behind = [r for r in ranks if r.reply is None and r.step == fewest]
    # all ranks made the same number of steps: the cause is a rank outside of collectives
    if len(behind) == len(ranks):
        behind = [r for r in ranks if not _is_waiting(stacks[r.number])] or list(ranks)
    description = "; ".join(
        f"rank {r.number}: {r.doing.partition(AT)[0]}{_position(stacks[r.number])}" for r in behind
    )
    others = [str(r.number) for r in ranks if r not in behind]
    if others:
        description += f"; rank {', '.join(others)} waits for it"
    return description, behind[0].doing.partition(AT)[2]


def _read_stacks(ranks: Sequence[Member], folder: str) -> dict[int, list[str]]:
    """Make every rank write its stack, and return the frames by rank, the innermost first."""
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGUSR1)
    time.sleep(STACK_SECONDS)
    stacks = {}
    for rank in ranks:
        with open(_stack_file(folder, rank.number)) as file:
            stacks[rank.number] = [line for line in file if line.startswith("  File ")]
    return stacks


def _is_waiting(stack: list[str]) -> bool:
    """Return True if a rank is in a collective, or waits until its GPU has finished one."""
    return bool(stack) and bool(_WAITING.search(stack[0]))


def _position(stack: list[str]) -> str:
    """Return the innermost line outside of libraries, such as ``, in summed (page_test.py:12)``."""
    for frame in map(_FRAME.match, stack):
        if frame and not frame["file"].startswith(libraries()):
            return f", in {frame['name']} ({os.path.basename(frame['file'])}:{frame['line']})"
    return ""


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        launch(sys.argv[2], sys.argv[3:])
    elif sys.argv[1] == "profile":
        profile(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1] == "beside":
        die_with_parent()
        run_file(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        serve(sys.argv[1])
