"""A seat is a process on a node. Ray assigns GPUs to the seat, which starts pytest on them.

This module does not import Ray. The module `bridge` turns `Seat` into a Ray actor.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from ..distributed.multi_node import RankServer
from . import shipping
from .nodes import RayNode

POLL_SECONDS = 2.0
"""The longest time that `Seat.poll` waits for a message."""
ALONE_SECONDS = 60.0
"""A seat that is not polled for this many seconds ends, because the main process must be gone."""
INJECTED = ("OMP_NUM_THREADS", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "PYTHONBREAKPOINT")
"""Environment variables that Ray sets in its workers, and that are removed before pytest starts."""
PR_SET_PDEATHSIG = 1
OUTPUT_LINES = 20
"""The largest number of lines of pytest's output in the reason why a seat was lost."""


class Seat:
    """Some GPUs of this node, and the pytest process that runs cases on them."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ours: Connection | None = None
        self._sending = threading.Lock()
        self._polled = time.monotonic()
        self._closed = threading.Event()
        self._tree = contextlib.ExitStack()
        self._log = Path(os.devnull)

    def start(self, data: bytes, spec: Mapping[str, object], gpus: Sequence[str]) -> None:
        """Unpack the tree, and start pytest on `gpus`.

        Args:
            data: the packed tree.
            spec: the settings for `remote.main`, and ``digest``, ``variables`` and ``seat``. With
                ``key``, a rank server is started instead of pytest (`rank_server`).
            gpus: the UUIDs of the GPUs. Empty if they are simulated.

        Raises:
            ShippingError: if the tree cannot be unpacked.
        """
        folder = self._tree.enter_context(shipping.unpacked(data, str(spec["digest"])))
        variables = spec["variables"]
        assert isinstance(variables, Mapping)
        environment = node_environment(os.environ, variables, gpus)
        self._ours, theirs = Pipe()
        self._log = folder / f"{spec['seat']}.log"
        started = threading.Event()
        module = "rank_server" if "key" in spec else "remote"
        run = (module, environment, theirs, folder / "tree" / str(spec["folder"]), started)
        # `die_with` ends pytest when the thread that started it ends. So the thread waits.
        threading.Thread(target=self._run, args=run, daemon=True).start()
        started.wait()
        if self._process is None:
            raise shipping.ShippingError(f"pytest cannot be started in {folder}")
        self._ours.send_bytes(pickle.dumps({**spec, "tree": str(folder / "tree")}))
        threading.Thread(target=self._end_if_alone, daemon=True).start()

    def _run(
        self,
        module: str,
        environment: Mapping[str, str],
        pipe: Connection,
        cwd: Path,
        started: threading.Event,
    ) -> None:
        command = [sys.executable, "-m", f"pytest_aisp.fleet.{module}", str(pipe.fileno())]
        try:
            with open(self._log, "wb") as log:
                self._process = subprocess.Popen(
                    [*command, str(os.getpid())],
                    cwd=cwd,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[pipe.fileno()],
                )
        finally:
            pipe.close()
            started.set()
        self._process.wait()

    def send(self, message: bytes) -> None:
        """Send a pickled message to pytest. If pytest has ended, the message is dropped."""
        with self._sending, contextlib.suppress(OSError):
            assert self._ours is not None
            self._ours.send_bytes(message)

    def poll(self) -> list[bytes]:
        """Return the messages from pytest since the last call. Wait briefly if there are none.

        After the process has ended, the last message is ``("ended", code, output)``.
        """
        self._polled = time.monotonic()
        found: list[bytes] = []
        assert self._ours is not None
        assert self._process is not None
        try:
            while self._ours.poll(0 if found else POLL_SECONDS):
                found.append(self._ours.recv_bytes())
        except (EOFError, OSError):
            found.append(pickle.dumps(("ended", self._process.wait(), self._output())))
        return found

    def _output(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._log.read_text(errors="replace").splitlines()
            return "\n".join(lines[-OUTPUT_LINES:])
        return ""

    def _end_if_alone(self) -> None:
        while time.monotonic() - self._polled < ALONE_SECONDS:
            if self._closed.wait(1):
                return
        self.close()
        os._exit(1)

    def close(self) -> None:
        """Kill pytest and its worker processes, and remove the tree."""
        self._closed.set()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._tree.close()


class SharedStart:
    """Start a seat on several nodes: first the rank servers, and then pytest.

    Args:
        nodes: the nodes. pytest runs on the first one.
        gpus: the number of GPUs of each node.
        spec: the settings for pytest, without those about the nodes.
    """

    def __init__(self, nodes: Sequence[RayNode], gpus: int, spec: Mapping[str, Any]) -> None:
        self._nodes, self._gpus, self._spec = nodes, gpus, spec
        self._key = secrets.token_bytes(32)
        self._ports: dict[int, int] = {}

    def server(self, part: int) -> dict[str, Any]:
        """Return the settings for the rank server on node number `part`."""
        seat = f"{self._spec['seat']}-server"
        return {**self._spec, "seat": seat, "host": self._nodes[part].address, "key": self._key}

    def listens(self, part: int, port: int) -> dict[str, Any] | None:
        """Note the port of a rank server. When all have one, return the settings for pytest."""
        self._ports[part] = port
        first, *others = self._nodes
        if len(self._ports) < len(others):
            return None
        servers = [
            RankServer(node.name, node.address, self._ports[number])
            for number, node in enumerate(others, 1)
        ]
        about = {"name": first.name, "host": first.address, "share": self._gpus}
        return {**self._spec, "machines": {**about, "servers": servers, "key": self._key}}


def node_environment(
    node: Mapping[str, str], variables: Mapping[str, str], gpus: Sequence[str]
) -> dict[str, str]:
    """Return the environment of pytest on a node.

    Args:
        node: the environment of the Ray worker. Variables that Ray added are removed.
        variables: the environment variables that the main process sends.
        gpus: the UUIDs of the GPUs. Empty if they are simulated.
    """
    kept = {k: v for k, v in node.items() if not k.startswith("RAY_") and k not in INJECTED}
    chosen = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    return {**kept, **variables, **chosen}


def uuids_of(ray_ids: Sequence[int | str], uuids: Sequence[str]) -> list[str]:
    """Return the UUIDs of the GPUs that Ray assigned. `ray_ids` are NVML indices or UUIDs."""
    ids = [str(each) for each in ray_ids]
    return [uuids[int(each)] if each.isdecimal() else each for each in ids] if uuids else []


def die_with(parent: int) -> None:
    """End this process at once when the thread that started it ends.

    Args:
        parent: the id of the process that started this one, which may have ended already.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
