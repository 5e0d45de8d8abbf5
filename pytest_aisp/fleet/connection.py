"""pytest's connection to the separate process that uses Ray."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any

CONNECT_SECONDS = 60.0
"""The longest time in seconds to wait for a connection to Ray."""
END_SECONDS = 15.0
"""Seconds to wait until the seats have ended. After this time, Ray ends the seats with the job."""


class HeadGone(Exception):
    """The head node of the cluster, or the process that uses Ray, has ended."""


class NoCluster(Exception):
    """No Ray cluster can be reached. The message says what to do."""


class RayProcess:
    """The process that runs the module `bridge`, which describes the commands and events."""

    def __init__(self, address: str) -> None:
        self._pipe, theirs = Pipe()
        command = [sys.executable, "-m", "pytest_aisp.fleet.bridge", str(theirs.fileno())]
        environment = {name: v for name, v in os.environ.items() if name != "RAY_ADDRESS"}
        self._process = subprocess.Popen(
            [*command, str(os.getpid()), address],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # only pytest gets Ctrl-C; it then ends the seats
        )
        theirs.close()
        self._connect(address)

    def _connect(self, address: str) -> None:
        if not self._pipe.poll(CONNECT_SECONDS):
            self.close()
            raise NoCluster(f"{address} does not answer within {CONNECT_SECONDS:.0f} s")
        try:
            kind, *rest = self._pipe.recv()
        except (EOFError, OSError):
            kind, rest = "fatal", [f"Ray ended while it connected to {address}"]
        if kind == "fatal":
            self.close()
            raise NoCluster(rest[0])

    @property
    def pipe(self) -> Connection:
        """The connection on which events arrive."""
        return self._pipe

    def send(self, *command: object) -> None:
        """Send a command.

        Raises:
            HeadGone: if the process has ended.
        """
        try:
            self._pipe.send(command)
        except OSError:
            raise HeadGone("the process that talks to Ray has ended") from None

    def events(self, timeout: float) -> Iterator[tuple[Any, ...]]:
        """Yield the events that have arrived. Wait up to `timeout` seconds for the first event.

        Raises:
            HeadGone: if the process has ended, or reports that the head node is gone.
        """
        try:
            while self._pipe.poll(timeout):
                event = self._pipe.recv()
                if event[0] == "fatal":
                    raise HeadGone(event[1])
                yield event
                timeout = 0
        except (EOFError, OSError):
            raise HeadGone("the process that talks to Ray has ended") from None

    def end_seats(self, seats: list[str]) -> None:
        """Kill seats, and wait up to `END_SECONDS` until they have ended."""
        deadline = time.monotonic() + END_SECONDS
        with contextlib.suppress(HeadGone):
            self.send("kill", seats)
            while (left := deadline - time.monotonic()) > 0:
                if any(event == ("killed", seats) for event in self.events(left)):
                    return

    def close(self) -> None:
        """End the process. Ray then ends everything that the process has started."""
        self._pipe.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
