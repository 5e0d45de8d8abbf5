"""The rank server of a node: it starts ranks and holds leases for pytest on another node.

    python -m pytest_aisp.fleet.rank_server DESCRIPTOR PARENT

The process reads its settings from a pipe, and writes ``("port", number)`` to it. A connection
begins with one of these messages:

- ``("reach", servers)``: connect to them. Reply with the first one that cannot be reached and with
  the error, or with None.
- ``("lease", gpus, shared)``: hold leases until the connection ends. The reply is None when the
  leases are held. Until then, replies are ``("waiting", text)`` or ``("error", text)``.
- ``("ranks", count, environment, nodes, tree, paths)``: start ranks, which end with the connection.
  Then ``("tree", path, data)`` brings old code, and each ``("task", line, seconds)`` gets a line.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import socket
import sys
import tarfile
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import Any

from ..distributed.launcher import RankSet
from ..distributed.multi_node import REACH_SECONDS, RankServer, gloo_interface
from ..results import encoding
from ..util.gpu_lease import REMEDY, lease
from .seat import die_with

GPUS = "CUDA_VISIBLE_DEVICES"


def main(descriptor: int, parent: int) -> None:
    """Serve connections until the process that started this one ends."""
    die_with(parent)
    pipe = Connection(descriptor)
    spec = pickle.loads(pipe.recv_bytes())
    with Listener((spec["host"], 0), backlog=16) as listener:
        pipe.send_bytes(pickle.dumps(("port", listener.address[1])))
        while True:
            with contextlib.suppress(ConnectionError):
                run = listener.accept(), spec
                threading.Thread(target=_serve, args=run, daemon=True).start()


def _serve(connection: Connection, spec: Mapping[str, Any]) -> None:
    tree, key = spec["tree"], spec["key"]
    with connection, contextlib.suppress(EOFError, OSError, AuthenticationError):
        # `Listener` would do this before it accepts the next connection, so that a stranger who
        # sends nothing, such as a port scanner, would block all others.
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        match connection.recv():
            case ("reach", servers):
                connection.send(_first_unreachable(servers))
            case ("lease", gpus, shared):
                _hold_leases(connection, gpus=gpus, shared=shared)
            case ("ranks", count, environment, nodes, theirs, paths):
                own = {GPUS: os.environ.get(GPUS)} if environment.get(GPUS) else {}
                imported = [*(tree + path.removeprefix(theirs) for path in paths), *sys.path]
                own |= gloo_interface(spec["host"])
                own["PYTHONPATH"] = os.pathsep.join(filter(None, imported))
                ranks = RankSet(count, {**environment, **own}, nodes)
                RankConnection(connection, {theirs: tree}).serve(ranks)


def _first_unreachable(servers: Sequence[RankServer]) -> tuple[RankServer, str] | None:
    for server in servers:
        try:
            socket.create_connection((server.host, server.port), REACH_SECONDS).close()
        except OSError as error:
            return server, str(error)
    return None


def _hold_leases(connection: Connection, *, gpus: bool, shared: bool) -> None:
    def waiting(text: str) -> None:
        connection.send(("waiting", text))

    names = sorted(filter(None, os.environ.get(GPUS, "").split(","))) if gpus else []
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(lease("host", shared=shared, waiting=waiting))
            for name in names:
                held.enter_context(lease(name, waiting=waiting))
        except OSError as error:
            connection.send(("error", f"{error}\n{REMEDY}"))
            return
        connection.send(None)
        connection.recv()  # raises EOFError when the connection ends


class RankConnection:
    """A connection that has ranks on this node.

    Args:
        folders: the folder on this node with the same files, keyed by the folder on the other node.
    """

    def __init__(self, connection: Connection, folders: Mapping[str, str]) -> None:
        self._connection, self._folders = connection, dict(folders)

    def serve(self, ranks: RankSet) -> None:
        """Let `ranks` answer tasks until the connection ends. Then end the ranks."""
        # This thread notices the end of the connection while another one waits for a reply.
        with ThreadPoolExecutor(1) as asking, contextlib.ExitStack() as unpacked:
            try:
                while True:
                    match self._connection.recv():
                        case ("task", line, seconds):
                            asking.submit(self._answer, ranks, line, seconds)
                        case ("tree", path, data):
                            folder = unpacked.enter_context(tempfile.TemporaryDirectory())
                            with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as tar:
                                tar.extractall(folder, filter="fully_trusted")
                            self._folders[path] = folder
            finally:
                ranks.kill()
                asking.shutdown()
                ranks.close()

    def _answer(self, ranks: RankSet, line: bytes, seconds: float) -> None:
        text = line.decode()
        for theirs, own in self._folders.items():
            text = text.replace(_in_json(theirs), _in_json(own))
        reply = ranks.ask(encoding.decode_task(text.encode()), seconds, lambda _: None)
        back: Any = encoding.encode(reply).decode()
        for theirs, own in self._folders.items():
            back = back.replace(_in_json(own), _in_json(theirs))
        with contextlib.suppress(OSError):
            self._connection.send(back.encode())


def _in_json(path: str) -> str:
    return json.dumps(path)[1:-1]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
