"""The process that uses Ray for pytest.

Ray may end the process that imports it, for example when the head node is gone. So pytest never
imports Ray, but sends commands to this process and receives events. If this process ends, pytest
keeps the finished cases. Commands and events are tuples. The docstring of `Bridge` lists them.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from . import probe as probe_module
from .nodes import LABEL, RayNode
from .seat import Seat, die_with, uuids_of

SCAN_SECONDS = 1.0
HEAD_SECONDS = 20.0
"""If the head node does not list the nodes for this many seconds, it counts as gone."""
PROBE_SECONDS = 60.0
"""The longest time in seconds that `probe` may take on a node."""
WAIT_SECONDS = 0.02
"""Seconds between two checks for commands while no seat has a message."""
CLOSE_SECONDS = 5.0
"""The longest time in seconds for seats to end pytest and remove the tree."""
PORT_SECONDS = 5.0
LOST = "Ray lost it"
THREADS = 4
"""Number of calls that a seat can run at once, so that a seat receives messages during a poll."""


class Bridge:
    """Executes commands with Ray, and sends events.

    Commands: ``("tree", data)``, ``("start", seat, node, gpus, spec)``,
    ``("send", seat, message)``, ``("kill", seats)``.

    Events: ``("connected",)``, ``("listed", nodes)``, ``("fatal", why)``, ``("gone", node)``,
    ``("node", RayNode, facts, time)``, ``("refused", RayNode, why)``, ``("lost", seat, why)``,
    ``("alive", seat, [messages])``, ``("killed", seats)``.
    """

    def __init__(self, pipe: Connection, address: str) -> None:
        self._pipe, self._address = pipe, address
        self._commands: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._lists: queue.SimpleQueue[list[dict[str, Any]]] = queue.SimpleQueue()
        self._scanned = time.monotonic()
        self._alive: dict[str, RayNode] = {}
        self._uuids: dict[str, list[str]] = {}
        self._actors: dict[str, Any] = {}
        self._pending: dict[Any, Callable[[Any], None]] = {}
        self._probes: dict[str, tuple[Any, float]] = {}
        self._closing: list[tuple[float, list[str], list[Any], list[Any]]] = []
        self._tree: Any = None
        self._listed = False

    def run(self) -> NoReturn:
        """Connect to Ray, and execute commands until pytest closes the pipe."""
        ray = _import_ray(self._fatal)
        try:
            _refuse_closed_port(self._address)
            quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
            ray.init(address=self._address, **quiet)
        except Exception as error:  # Ray and gRPC raise many types of errors, and all are fatal
            self._fatal(_refused_connection(self._address, error))
        self._ray = ray
        self._pipe.send(("connected",))
        for work in (self._read_commands, self._scan):
            threading.Thread(target=work, daemon=True).start()
        while True:
            self._carry_out_commands()
            self._update_nodes()
            self._end_closed()
            self._collect()

    def _fatal(self, why: str) -> NoReturn:
        self._pipe.send(("fatal", why))
        os._exit(1)

    def _read_commands(self) -> None:
        try:
            while True:
                self._commands.put(self._pipe.recv())
        except (EOFError, OSError):
            os._exit(0)  # Ray then ends the job of this process, and the job's actors

    def _scan(self) -> None:
        while True:
            listed = self._ray.nodes()
            self._scanned = time.monotonic()
            self._lists.put(listed)
            time.sleep(SCAN_SECONDS)

    def _carry_out_commands(self) -> None:
        while not self._commands.empty():
            kind, *rest = self._commands.get()
            getattr(self, f"do_{kind}")(*rest)

    def do_tree(self, data: bytes) -> None:
        self._tree = self._ray.put(data)

    def do_start(self, seat: str, node: str, gpus: int, spec: Mapping[str, Any]) -> None:
        try:
            actor = (
                _actor_class(self._ray)
                .options(num_gpus=gpus, max_concurrency=THREADS, scheduling_strategy=self._on(node))
                .remote(self._uuids[node])
            )
            self._actors[seat] = actor
            started = actor.start.remote(self._tree, dict(spec))
        except Exception as error:  # Ray may have just lost the node
            self._pipe.send(("lost", seat, _reason(error)))
            return
        self._expect(started, seat, lambda _: self._poll(seat))

    def _expect(self, reference: Any, seat: str, then: Callable[[Any], None]) -> None:
        def handle(ready: Any) -> None:
            if seat not in self._actors:
                return
            try:
                then(self._ray.get(ready))
            except Exception as error:  # an error on the node, or an error that Ray raised
                self._actors.pop(seat, None)
                self._pipe.send(("lost", seat, _reason(error)))

        self._pending[reference] = handle

    def _poll(self, seat: str) -> None:
        def deliver(messages: list[bytes]) -> None:
            self._pipe.send(("alive", seat, messages))
            self._poll(seat)

        self._expect(self._actors[seat].poll.remote(), seat, deliver)

    def do_send(self, seat: str, message: bytes) -> None:
        if seat in self._actors:
            self._actors[seat].send.remote(message)

    def do_kill(self, seats: list[str]) -> None:
        actors = [actor for seat in seats if (actor := self._actors.pop(seat, None)) is not None]
        closing = [actor.close.remote() for actor in actors]
        self._closing.append((time.monotonic() + CLOSE_SECONDS, seats, actors, closing))

    def _end_closed(self) -> None:
        """Kill actors that have closed or timed out. Do not wait, because polling must go on."""
        for entry in list(self._closing):
            deadline, seats, actors, closing = entry
            left = (
                self._ray.wait(closing, num_returns=len(closing), timeout=0)[1] if closing else []
            )
            if left and time.monotonic() < deadline:
                continue
            self._closing.remove(entry)
            for actor in actors:
                self._ray.kill(actor)
            self._pipe.send(("killed", seats))

    def _on(self, node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node, soft=False)

    def _update_nodes(self) -> None:
        if time.monotonic() - self._scanned > HEAD_SECONDS:
            self._fatal(f"the head at {self._address} does not answer any more")
        while not self._lists.empty():
            listed = {n["NodeID"]: n for n in self._lists.get() if n["Alive"]}
            if not self._listed:
                self._listed = True
                self._pipe.send(("listed", sum(_ray_node(n).told for n in listed.values())))
            for node in set(self._alive) - set(listed):
                lost = self._alive.pop(node)
                if self._probes.pop(node, None) is not None:
                    self._pipe.send(("refused", lost, LOST))
                self._pipe.send(("gone", node))
            for node in sorted(set(listed) - set(self._alive)):
                self._join(_ray_node(listed[node]))
        for node, (_, since) in list(self._probes.items()):
            if time.monotonic() - since > PROBE_SECONDS:
                del self._probes[node]
                why = f"it did not tell its facts within {PROBE_SECONDS:.0f} s"
                self._pipe.send(("refused", self._alive[node], why))

    def _join(self, node: RayNode) -> None:
        self._alive[node.id] = node
        if not node.gpus:
            if LABEL in node.labels:
                why = (
                    "it has a product, but Ray has no GPU of it to give\nRay needs --num-gpus there"
                )
                self._pipe.send(("refused", node, why))
            return
        task = self._ray.remote(probe_module.probe)
        reference = task.options(num_cpus=0, scheduling_strategy=self._on(node.id)).remote()
        self._probes[node.id] = reference, time.monotonic()
        self._pending[reference] = functools.partial(self._told, node)

    def _told(self, node: RayNode, reference: Any) -> None:
        if self._probes.pop(node.id, None) is None:
            return
        try:
            facts = self._ray.get(reference)
        except Exception as error:  # an error on the node, or an error that Ray raised
            self._pipe.send(("refused", node, _reason(error)))
            return
        self._uuids[node.id] = facts["uuids"]
        self._pipe.send(("node", node, facts, time.time()))

    def _collect(self) -> None:
        if not self._pending:
            time.sleep(WAIT_SECONDS)
            return
        ready, others = self._ray.wait(list(self._pending), num_returns=1, timeout=WAIT_SECONDS)
        if ready and others:
            ready += self._ray.wait(others, num_returns=len(others), timeout=0)[0]
        for reference in ready:
            self._pending.pop(reference)(reference)


def _refuse_closed_port(address: str) -> None:
    """Raise OSError at once if nothing listens at `address`. Ray itself would try for a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), PORT_SECONDS).close()


def _import_ray(fatal: Callable[[str], NoReturn]) -> Any:
    warnings.simplefilter("ignore")
    try:
        import ray
        from ray import cloudpickle
    except ImportError as error:
        fatal(f"Ray cannot be imported: {error}\n    pip install 'pytest-aisp[fleet]'")
    # The probe is sent as code, because the plugin may be missing on a node.
    cloudpickle.register_pickle_by_value(probe_module)  # type: ignore[no-untyped-call]
    return ray


def _actor_class(ray: Any) -> Any:
    class RaySeat(Seat):
        def __init__(self, uuids: list[str]) -> None:
            super().__init__()
            self._uuids = uuids

        def start(self, data: bytes, spec: Mapping[str, object]) -> None:  # type: ignore[override]
            import ray

            super().start(data, spec, uuids_of(ray.get_gpu_ids(), self._uuids))

    return ray.remote(num_cpus=0, max_restarts=0)(RaySeat)


def _ray_node(listed: Mapping[str, Any]) -> RayNode:
    named, address = str(listed.get("NodeName", "")), str(listed["NodeManagerAddress"])
    host = str(listed["NodeManagerHostname"])
    name = host if named in ("", address) else named
    labels = dict(listed.get("Labels") or {})
    return RayNode(listed["NodeID"], name, int(listed["Resources"].get("GPU", 0)), labels)


def _refused_connection(address: str, error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    if "ersion" in text:
        return f"{address} runs another version of Ray or Python: {text}\nInstall the same here"
    if "Initialization failure" in text:
        return (
            f"{address} did not start a server for this client in time, as on a busy head\n"
            "Try again, or read ray_client_server.err in the logs of the head"
        )
    where = " on this machine" if address == "auto" else ""
    return (
        f"there is no Ray cluster at {address}{where}: {text}\n"
        "Start one, on its first machine:\n    aisp fleet start --head"
    )


def _reason(error: Exception) -> str:
    """Return the node's own error in a Ray exception, or the first line of the exception."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return f"{type(cause).__name__}: {cause}"
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


if __name__ == "__main__":
    die_with(int(sys.argv[2]))
    Bridge(Connection(int(sys.argv[1])), sys.argv[3]).run()
