"""One rank as its launcher knows it, and which of several the others wait for."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ..bench.printed import Printed
from ..pages.sources import libraries
from ..results.messages import AT, Reply
from .rank import stack_of

STACK_SECONDS = 0.5
"""Seconds that silent ranks get to print where they stand."""
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\w+)')
_WAITING = re.compile(r"/torch/distributed/|/torch/cuda/\S+\", line \d+ in synchronize|/peers\.py")


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
    printed: Printed
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
