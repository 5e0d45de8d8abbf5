"""One rank of a page that runs on several: a bench process that is started n times and joined.

    python -m pytest_aisp.ranks.rank launch SOCKET [arguments of torchrun]
    python -m pytest_aisp.ranks.rank SOCKET                     what that starts, once a rank

The first runs torch's elastic launcher; each rank connects to SOCKET, joins the others, and answers
the same tasks as a bench process does. All of them die with the process that launched them.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
from dataclasses import replace
from typing import Any

from ..bench.printed import STREAMS
from ..bench.server import Server, die_with_parent, encoded, print_at_once
from ..common import peers
from ..common.peers import Ranks
from ..results import messages

APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def launch(address: str, arguments: list[str]) -> None:
    """Run torch's elastic launcher on this program; dies with its parent."""
    die_with_parent()
    from torch.distributed.run import main as run

    run([*arguments, "-m", "pytest_aisp.ranks.rank", address])


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

            def say(**what: Any) -> None:
                replies.write(messages.encode(what))

            say(rank=rank, pid=os.getpid())
            _join(rank, world, lambda number: say(step=number))
            server = Server(lambda text: say(progress=text))
            say(progress=messages.READY)
            for line in tasks:
                task = messages.task_from(messages.decode(line))
                if task.kind == "stop":
                    break
                # Each launcher has drawn a seed of its own: values are those of rank 0's.
                task = replace(task, seed=peers.here().shared(task.seed))
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
    peers.join(Ranks(rank, world, tell))


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        launch(sys.argv[2], sys.argv[3:])
    else:
        serve(sys.argv[1])
