"""Ranks of one case on several machines. pytest on the first machine controls all ranks.

Each other machine runs a rank server (`rank_server`). pytest opens one connection to each server
for each set of ranks, and sends every task to all machines at once. When a connection ends, its
ranks end too. All machines have an equal share of the ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from msgspec.structs import replace

from ..results import encoding
from ..results.messages import PageSource, Reply, Task, timeout_reply
from ..worker.client import Progress
from .launcher import GRACE_SECONDS, LOST_HINT, Nodes, RankSet, merged

REACH_SECONDS = 10.0
"""The longest time in seconds that a connection between two machines may take."""
SILENT_SECONDS = 40.0
"""Seconds after which a fleet has noticed that a machine is silent, and has ended this process."""
LOST = "its rank server has ended"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of a network interface."""


@dataclass(frozen=True)
class RankServer:
    """A rank server on another machine: the machine's name, and the server's address."""

    name: str
    host: str
    port: int


class Unreachable(Exception):
    """Two machines cannot connect to each other. The message names them and the remedy."""


@dataclass(frozen=True)
class Machines:
    """This machine, and the other machines on which a case has ranks.

    Attributes:
        name, host: this machine's name, and its address for the other machines.
        share: the number of ranks on each machine.
        servers: the rank servers of the other machines.
        key: the secret that both ends of a connection must share.
        tree: the working tree on this machine. Each server replaces this path with its own tree.
        lost: a function that is called with the number of a machine, counted from 0, if the
            machine's rank server is gone. The case then has no verdict, so the function ends the
            process or raises an exception.
    """

    name: str
    host: str
    share: int
    servers: Sequence[RankServer]
    key: bytes
    tree: str
    lost: Callable[[int, str], NoReturn]

    @property
    def count(self) -> int:
        """The number of machines."""
        return 1 + len(self.servers)

    @property
    def ranks(self) -> int:
        """The number of ranks on all machines together."""
        return self.count * self.share

    @property
    def paths(self) -> list[str]:
        """The folders of the working tree from which modules are imported."""
        return [path for path in sys.path if Path(path).is_relative_to(self.tree)]

    def check(self) -> None:
        """Make every machine connect to every other one, as the ranks will.

        Raises:
            Unreachable: if a connection fails.
        """
        with socket.create_server((self.host, 0)) as listener:
            own = RankServer(self.name, self.host, listener.getsockname()[1])
            for server in self.servers:
                others = [own, *(each for each in self.servers if each != server)]
                try:
                    with self._open(server) as connection:
                        connection.send(("reach", others))
                        failed: tuple[RankServer, str] | None = connection.recv()
                except (OSError, EOFError, AuthenticationError) as error:
                    raise Unreachable(_unreachable(self.name, server, str(error))) from None
                if failed is not None:
                    raise Unreachable(_unreachable(server.name, *failed))

    def _open(self, server: RankServer) -> Connection:
        address = server.host, server.port
        socket.create_connection(address, REACH_SECONDS).close()  # `Client` has no time limit
        return Client(address, authkey=self.key)

    def connect(self, number: int, *hello: object) -> Connection:
        """Connect to the server of machine `number`, and send it `hello`."""
        try:
            connection = self._open(self.servers[number - 1])
            connection.send(hello)
        except (OSError, EOFError, AuthenticationError) as error:
            self.lost(number, f"{LOST}: {error}")
        return connection

    @contextlib.contextmanager
    def leases(self, *, gpus: bool, shared: bool, waiting: Callable[[str], None]) -> Iterator[None]:
        """Hold the leases of the other machines' hosts and GPUs inside the block.

        All runs take the leases in the same order of machines, which prevents deadlocks.

        Args:
            gpus: True to hold the GPUs too.
            shared: True if other cases may share the host.

        Raises:
            OSError: if a machine's folder of leases cannot be written.
        """
        with contextlib.ExitStack() as held:
            for number, server in enumerate(self.servers, 1):
                connection = held.enter_context(self.connect(number, "lease", gpus, shared))
                while (message := self.receive(number, connection)) is not None:
                    kind, text = message
                    if kind == "error":
                        raise OSError(f"{server.name}: {text}")
                    waiting(f"{server.name}: {text}")
            yield

    def receive(self, number: int, connection: Connection) -> Any:
        """Return the next message of machine `number`."""
        try:
            return connection.recv()
        except (OSError, EOFError):
            self.lost(number, LOST)


def _unreachable(name: str, other: RankServer, why: str) -> str:
    return (
        f"{name} cannot reach {other.name} at {other.host}: {why}\n"
        "Open the ports between both, or start Ray with --node-ip-address=ADDRESS of a network"
        " that both share"
    )


class SpanningRanks(RankSet):
    """Ranks on several machines, as one worker. Creating the object starts all ranks.

    Args:
        environment: variables to set for the ranks. A variable with the value None is removed.
    """

    def __init__(self, machines: Machines, environment: Mapping[str, str | None]) -> None:
        self._machines = machines
        self._reserved = _reserved_port(machines.host)
        endpoint = f"{machines.host}:{self._reserved.getsockname()[1]}"
        self._connections: dict[int, Connection] = {}
        self._sent: set[str] = set()
        self._replies: dict[int, Reply] = {}
        self._failed = float("inf")
        self._asking = False
        for number in range(1, machines.count):
            nodes = Nodes(endpoint, machines.count, number)
            hello = "ranks", machines.share, dict(environment), nodes, machines.tree, machines.paths
            self._connections[number] = machines.connect(number, *hello)
        own = {**environment, **gloo_interface(machines.host)}
        super().__init__(machines.share, own, Nodes(endpoint, machines.count, 0))

    def ask(self, task: Task, seconds: float, progress: Progress) -> Reply:
        """Send `task` to all ranks, and return rank 0's reply, or the failure of a rank.

        The other machines answer within `seconds`. This machine waits a little longer, so that
        another machine can still report that a rank hangs.
        """
        self._replies, self._failed, self._asking = {}, float("inf"), True
        try:
            self._send(task, seconds)
            mine = super().ask(task, seconds + GRACE_SECONDS, progress)
            self._wait(mine, seconds)
        except BaseException:
            self._asking = False
            self.kill()
            raise
        self._asking = False
        reply = self._combined(mine, seconds)
        if reply.error is not None or reply.exhausted:
            self.kill()
        return reply

    def _send(self, task: Task, seconds: float) -> None:
        messages: list[tuple[object, ...]] = [("task", encoding.encode(task), seconds)]
        past = getattr(task, "past", None)
        if isinstance(past, PageSource) and past.root not in self._sent:
            self._sent.add(past.root)
            messages.insert(0, ("tree", past.root, _packed(past.root)))
        for number, connection in self._open_connections().items():
            try:
                for message in messages:
                    connection.send(message)
            except OSError:
                self._machines.lost(number, LOST)

    def _open_connections(self) -> dict[int, Connection]:
        """Return the connections by machine. There are none after `kill`."""
        return {n: each for n, each in self._connections.items() if not each.closed}

    def _hear(self, seconds: float) -> None:
        """Receive the replies that arrive within `seconds`."""
        open_ = {c: n for n, c in self._open_connections().items() if n not in self._replies}
        for connection in wait(list(open_), seconds) if open_ else ():
            assert isinstance(connection, Connection)
            number = open_[connection]
            line = self._machines.receive(number, connection)
            reply = encoding.decode(line)
            assert isinstance(reply, Reply)
            self._replies[number] = reply
            if reply.error not in (None, "timeout"):
                self._failed = min(self._failed, time.monotonic())

    def _receive(self, seconds: float) -> list[str]:
        """Receive messages of this machine's ranks. End these ranks if a machine has failed."""
        self._hear(0)
        if time.monotonic() - self._failed > GRACE_SECONDS:
            self.kill()
        return super()._receive(seconds)

    def _wait(self, mine: Reply, seconds: float) -> None:
        """Wait for the replies of the other machines.

        A machine that does not reply in time, or to which a rank here has lost its connection, may
        have died. The fleet then detects the loss and ends this process.
        """
        has_cause = mine.error not in (None, "timeout") and not _is_lost(mine)
        patience = GRACE_SECONDS if has_cause else max(seconds, SILENT_SECONDS)
        deadline = time.monotonic() + patience
        while len(self._replies) < len(self._connections) and time.monotonic() < deadline:
            self._hear(0.1)

    def _combined(self, mine: Reply, seconds: float) -> Reply:
        replies = [mine, *(self._replies[number] for number in sorted(self._replies))]
        failures = [reply for reply in replies if reply.error is not None]
        # If a machine failed, the ranks here were ended, so they only report their own end.
        if self._replies and time.monotonic() - self._failed > GRACE_SECONDS and failures[1:]:
            failures = [reply for reply in failures if reply is not mine]
        if not failures:
            names = (server.name for server in self._machines.servers)
            silent = [name for n, name in enumerate(names, 1) if n not in self._replies]
            if silent:
                return timeout_reply(seconds, f"{' and '.join(silent)} sent no reply", "")
            return merged(replies)
        causes = [r for r in failures if r.error != "timeout" and not _is_lost(r)]
        hung = [reply for reply in failures if reply.error == "timeout"]
        if causes or not hung:
            return (causes or failures)[0]
        doing = (reply.message.partition("\n")[0].partition(" during: ")[2] for reply in hung)
        reply = timeout_reply(seconds, "; ".join(doing), hung[0].trace)
        return replace(reply, at=hung[0].at)

    def kill(self) -> None:
        """Kill the ranks on this machine. If no task is running, end all other ranks too."""
        super().kill()
        if not self._asking:
            self._reserved.close()
            for connection in self._connections.values():
                connection.close()


def gloo_interface(host: str) -> dict[str, str]:
    """Return an environment variable that makes Gloo use the network interface of address `host`.

    Without it, Gloo uses the address of the machine's name, which is often a loopback address. The
    result is empty if the user has set the variable, or if no interface has the address.
    """
    for _, name in socket.if_nameindex() if GLOO_INTERFACE not in os.environ else ():
        with socket.socket(type=socket.SOCK_DGRAM) as any_socket, contextlib.suppress(OSError):
            found = fcntl.ioctl(any_socket, SIOCGIFADDR, name.encode().ljust(256, b"\0"))
            if socket.inet_ntoa(found[20:24]) == host:
                return {GLOO_INTERFACE: name}
    return {}


def _is_lost(reply: Reply) -> bool:
    return reply.error == "died" and reply.message.endswith(LOST_HINT)


def _reserved_port(host: str) -> socket.socket:
    """Return a socket that keeps a free port from all but the launcher, which listens later.

    Linux lets two sockets with SO_REUSEADDR share a port if at most one listens.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


def _packed(folder: str) -> bytes:
    import tarfile

    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        tar.add(os.fspath(folder), ".")
    return data.getvalue()
