"""The process that uses Ray for pytest.

Ray may end the process that imports it, for example when the head node is gone. So pytest never
imports Ray, but sends commands to this process and receives events. If this process ends, pytest
keeps the finished cases. Commands and events are tuples. The docstring of `Bridge` lists them.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
import queue
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from . import probe as probe_module
from .nodes import LABEL, RayNode
from .seat import Seat, SharedStart, die_with, uuids_of

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

    Commands: ``("tree", data)``, ``("start", seat, nodes, gpus, spec)``,
    ``("send", seat, message)``, ``("kill", seats)``.

    Events: ``("connected",)``, ``("listed", nodes)``, ``("fatal", why)``, ``("gone", node)``,
    ``("node", RayNode, facts, time)``, ``("refused", RayNode, why)``,
    ``("lost", seat, why, part)``, ``("alive", seat, [messages], part)``, ``("killed", seats)``. A
    part is the number of one of the seat's nodes. pytest runs on part 0, and a rank server on each
    other part.
    """

    def __init__(self, pipe: Connection, address: str) -> None:
        self._pipe, self._address = pipe, address
        self._commands: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._lists: queue.SimpleQueue[list[dict[str, Any]]] = queue.SimpleQueue()
        self._scanned = time.monotonic()
        self._alive: dict[str, RayNode] = {}
        self._uuids: dict[str, list[str]] = {}
        self._actors: dict[str, list[Any]] = {}
        self._groups: dict[str, Any] = {}
        self._waiting: dict[str, SharedStart] = {}
        self._pending: dict[Any, Callable[[Any], None]] = {}
        self._probes: dict[str, tuple[Any, float]] = {}
        self._closing: list[tuple[float, list[str], list[Any], list[Any], list[Any]]] = []
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

    def do_start(self, seat: str, nodes: Sequence[str], gpus: int, spec: Mapping[str, Any]) -> None:
        self._actors[seat] = []
        try:
            for node, where in zip(nodes, self._places(seat, nodes, gpus), strict=True):
                options = {"num_gpus": gpus, "max_concurrency": THREADS}
                actor = _actor_class(self._ray).options(**options, scheduling_strategy=where)
                self._actors[seat].append(actor.remote(self._uuids[node]))
            if len(nodes) == 1:
                self._start_part(seat, 0, spec)
                return
            self._waiting[seat] = waiting = SharedStart([self._alive[n] for n in nodes], gpus, spec)
            for part in range(1, len(nodes)):
                self._start_part(seat, part, waiting.server(part))
        except Exception as error:  # Ray may have just lost the node
            self._pipe.send(("lost", seat, _reason(error), 0))

    def _places(self, seat: str, nodes: Sequence[str], gpus: int) -> list[Any]:
        """Return where to start the actor of each node. Several nodes are reserved together."""
        if len(nodes) == 1:
            return [self._on(nodes[0])]
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._groups[seat] = group = placement_group(
            [{"GPU": gpus} for _ in nodes],
            strategy="STRICT_SPREAD",
            bundle_label_selector=[{"ray.io/node-id": node} for node in nodes],
        )
        bundles = range(len(nodes))
        return [PlacementGroupSchedulingStrategy(group, bundle) for bundle in bundles]

    def _start_part(self, seat: str, part: int, spec: Mapping[str, Any]) -> None:
        started = self._actors[seat][part].start.remote(self._tree, dict(spec))
        self._expect(started, seat, part, lambda _: self._poll(seat, part))

    def _expect(self, reference: Any, seat: str, part: int, then: Callable[[Any], None]) -> None:
        def handle(ready: Any) -> None:
            if seat not in self._actors:
                return
            try:
                then(self._ray.get(ready))
            except Exception as error:  # an error on the node, or an error that Ray raised
                self._pipe.send(("lost", seat, _reason(error), part))

        self._pending[reference] = handle

    def _poll(self, seat: str, part: int) -> None:
        def deliver(messages: list[bytes]) -> None:
            self._pipe.send(("alive", seat, [] if part else messages, part))
            if part == 0 or self._hear_server(seat, part, map(pickle.loads, messages)):
                self._poll(seat, part)

        self._expect(self._actors[seat][part].poll.remote(), seat, part, deliver)

    def _hear_server(self, seat: str, part: int, messages: Iterable[tuple[Any, ...]]) -> bool:
        """Read what a rank server sent. Return False if it has ended."""
        for message in messages:
            match message:
                case ("port", port):
                    if (spec := self._waiting[seat].listens(part, port)) is not None:
                        del self._waiting[seat]
                        self._start_part(seat, 0, spec)
                case ("ended", code, output):
                    last = f"\n{output}" if output else ""
                    why = f"its rank server ended with code {code}{last}"
                    self._pipe.send(("lost", seat, why, part))
                    return False
        return True

    def do_send(self, seat: str, message: bytes) -> None:
        if seat in self._actors:
            self._actors[seat][0].send.remote(message)

    def do_kill(self, seats: list[str]) -> None:
        actors = [actor for seat in seats for actor in self._actors.pop(seat, [])]
        for seat in seats:
            self._waiting.pop(seat, None)
        groups = [self._groups.pop(seat) for seat in seats if seat in self._groups]
        closing = [actor.close.remote() for actor in actors]
        self._closing.append((time.monotonic() + CLOSE_SECONDS, seats, actors, closing, groups))

    def _end_closed(self) -> None:
        """Kill actors that have closed or timed out. Do not wait, because polling must go on."""
        for entry in list(self._closing):
            deadline, seats, actors, closing, groups = entry
            left = (
                self._ray.wait(closing, num_returns=len(closing), timeout=0)[1] if closing else []
            )
            if left and time.monotonic() < deadline:
                continue
            self._closing.remove(entry)
            for actor in actors:
                self._ray.kill(actor)
            for group in groups:
                self._ray.util.remove_placement_group(group)
            self._pipe.send(("killed", seats))

    def _on(self, node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node, soft=False)

    def _update_nodes(self) -> None:
        if time.monotonic() - self._scanned > HEAD_SECONDS:
            self._fatal(f"the head at {self._address} no longer answers")
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
                why = f"it did not report its configuration within {PROBE_SECONDS:.0f} s"
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
    gpus = int(listed["Resources"].get("GPU", 0))
    return RayNode(listed["NodeID"], name, gpus, labels, address)


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
