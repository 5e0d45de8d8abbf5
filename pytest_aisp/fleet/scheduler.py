"""Decide which case runs on which GPUs: the queues, nodes and seats of a fleet, without Ray.

A seat is a set of GPUs of one node, with one pytest process that runs cases one after another. The
scheduler receives events, and `plan` returns actions to execute and findings to report. The
scheduler reads no clock: each time is an argument, in seconds.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

ATTEMPTS = 2
"""A case is given up if this many seats were lost while they ran it."""
LOSSES = 2
"""A node that lost this many seats gets no more work."""
SILENCE = 30.0
"""A seat that is silent for this many seconds counts as lost. Seats report every 2 s."""


@dataclass(frozen=True)
class Work:
    """A case to run: its local node id, its product, and the number of GPUs that it needs.

    Attributes:
        again: True if the case already has a verdict. The second run confirms the verdict, or
            records the case on a second board.
    """

    key: str
    product: str
    gpus: int = 1
    again: bool = False


@dataclass
class Node:
    """A machine with GPUs of one product, which gets work as long as `why_avoided` is empty."""

    id: str
    name: str
    product: str
    gpus: int
    losses: int = 0
    why_avoided: str = ""


@dataclass
class Seat:
    """Some GPUs of a node, and the pytest process that runs cases on them.

    Attributes:
        state: ``starting``, ``ready`` or ``finishing``.
        width: the number of GPUs.
        queue: the unfinished cases of the seat. The first case is running.
        unproved: the finished cases whose verdicts wait for the seat's canary.
    """

    id: str
    node: Node
    width: int
    state: str = "starting"
    heard: float = 0.0
    queue: list[Work] = field(default_factory=list)
    unproved: list[Work] = field(default_factory=list)


@dataclass(frozen=True)
class Start:
    """Start a seat on `gpus` GPUs of a node."""

    seat: str
    node: str
    gpus: int


@dataclass(frozen=True)
class Give:
    """Give a case to a seat."""

    seat: str
    work: Work


@dataclass(frozen=True)
class Finish:
    """Let a seat run its canary and end."""

    seat: str


@dataclass(frozen=True)
class Kill:
    """End a seat at once."""

    seat: str


@dataclass(frozen=True)
class NoVerdict:
    """A case gets no verdict. `why` gives the reason and says what to do."""

    work: Work
    why: str


@dataclass(frozen=True)
class Unproved:
    """The verdicts of a lost seat that no canary confirms."""

    seat: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Note:
    """A line for the terminal."""

    text: str


Action = Start | Give | Finish | Kill | NoVerdict | Unproved | Note


class Scheduler:
    """Distributes cases over nodes.

    Args:
        works: the cases, in the order in which they should run.
        patience: seconds to wait if a product has no node.
    """

    def __init__(self, works: list[Work], patience: float) -> None:
        self.patience = patience
        self.nodes: dict[str, Node] = {}
        self.seats: dict[str, Seat] = {}
        self._queues: dict[str, dict[int, deque[Work]]] = defaultdict(lambda: defaultdict(deque))
        self._lacking: dict[str, float] = {}  # by product: the time since which it has had no node
        self._where: dict[str, list[str]] = defaultdict(list)  # by case: nodes lost while it ran
        self._avoid: dict[str, set[str]] = defaultdict(set)  # by case: ids of nodes to avoid
        self._out: list[Action] = []
        self._started = 0
        for work in works:
            self._queues[work.product][work.gpus].append(work)

    # Events

    def node_joined(self, node: Node) -> None:
        """Add a node, which can get work from now on."""
        self.nodes[node.id] = node

    def node_left(self, node_id: str, why: str) -> None:
        """Drop a node that died, with all its seats."""
        if (node := self.nodes.get(node_id)) is None or node.why_avoided == why:
            return
        self._avoid_node(node, why)
        for seat in [seat for seat in self.seats.values() if seat.node is node]:
            self.lost(seat.id, why)

    def ready(self, seat_id: str, now: float) -> None:
        """Note that a seat's pytest has collected its cases."""
        if (seat := self.seats.get(seat_id)) is not None:
            seat.state, seat.heard = "ready", now

    def heard(self, seat_id: str, now: float) -> None:
        """Note that a seat is alive."""
        if (seat := self.seats.get(seat_id)) is not None:
            seat.heard = now

    def finished(self, seat_id: str, work: Work, *, unproved: bool) -> None:
        """Note the end of a case. If it is `unproved`, its verdict waits for the seat's canary."""
        if (seat := self.seats.get(seat_id)) is not None and work in seat.queue:
            seat.queue.remove(work)
            seat.unproved += [work] if unproved else []

    def proved(self, seat_id: str) -> None:
        """Note that the seat's canary passed."""
        if (seat := self.seats.get(seat_id)) is not None:
            seat.unproved.clear()

    def ended(self, seat_id: str) -> None:
        """Note that a seat's pytest has ended. Its GPUs are free."""
        seat = self.seats.get(seat_id)
        if seat is not None and (seat.queue or seat.unproved or seat.state != "finishing"):
            self.lost(seat_id, "its pytest ended before its work")
        else:
            self.seats.pop(seat_id, None)

    def lost(self, seat_id: str, why: str) -> None:
        """Note that a seat ended unexpectedly. Its cases run again, on another node if possible.

        The last messages may be lost too, so any case in the queue may have been running. When a
        case of this queue runs again, no other case waits behind that case in the seat.
        """
        if (seat := self.seats.pop(seat_id, None)) is None:
            return
        node, proving = seat.node, [w for w in seat.unproved if not w.again]
        self._out.append(Kill(seat.id))
        node.losses += 1
        if not node.why_avoided:
            self._out.append(Note(f"{node.name} lost a worker: {why}"))
        if node.losses >= LOSSES:
            self._avoid_node(node, f"it lost {node.losses} workers, the last one because {why}")
        if keys := tuple(w.key for w in [*seat.unproved, *seat.queue] if w.again):
            self._out.append(Unproved(node.name, keys))
        for work in reversed(seat.queue):
            if not work.again:
                self._retry(work, node)
        for work in proving:
            self.again(work, seat)

    def again(self, work: Work, seat: Seat) -> None:
        """Run `work` again, if possible on another node. It already has a verdict from `seat`."""
        self._avoid[work.key].add(seat.node.id)
        self._queues[work.product][work.gpus].append(
            Work(work.key, work.product, work.gpus, again=True)
        )

    def _retry(self, work: Work, node: Node) -> None:
        where = self._where[work.key]
        where.append(node.name)
        self._avoid[work.key].add(node.id)
        if len(where) < ATTEMPTS:
            self._queues[work.product][work.gpus].appendleft(work)
            return
        why = f"given up: {' and '.join(where)} were lost while they ran it"
        self._out.append(NoVerdict(work, f"{why}\nRun it alone on a node to see why"))

    def _avoid_node(self, node: Node, why: str) -> None:
        if not node.why_avoided:
            node.why_avoided = why
            self._out.append(Note(f"{node.name} gets no more work: {why}"))

    # Decisions

    @property
    def done(self) -> bool:
        """Whether all cases are done and all seats have ended."""
        return not (self.seats or self._out or any(self._pending()))

    def plan(self, now: float) -> list[Action]:
        """Return the actions to execute now, in order."""
        for seat in list(self.seats.values()):
            if seat.state != "starting" and now - seat.heard > SILENCE:
                self.lost(seat.id, f"it was silent for {SILENCE:.0f} s")
                self._avoid_node(seat.node, "it does not answer")
        self._give_up_on_missing(now)
        self._start_seats()
        self._give()
        taken, self._out = self._out, []
        return taken

    def _pending(self) -> Iterator[deque[Work]]:
        return (queue for queues in self._queues.values() for queue in queues.values() if queue)

    def usable(self, product: str) -> list[Node]:
        """Return the nodes of a product that may get work."""
        return [n for n in self.nodes.values() if n.product == product and not n.why_avoided]

    def _give_up_on_missing(self, now: float) -> None:
        for product, queues in self._queues.items():
            alive = any(seat.node.product == product for seat in self.seats.values())
            if alive or self.usable(product) or not any(queues.values()):
                self._lacking.pop(product, None)
            elif now - self._lacking.setdefault(product, now) >= self.patience:
                self._drop(product, queues)

    def _drop(self, product: str, queues: dict[int, deque[Work]]) -> None:
        known = [n for n in self.nodes.values() if n.product == product]
        why = f"no node of {product} for {self.patience:g} s (aisp_fleet_wait)"
        why += "".join(f"\n{n.name}: {n.why_avoided}" for n in known)
        why += "\nStart one, and run again:\n    aisp fleet start --address=HEAD:6379"
        for queue in queues.values():
            first = [work for work in queue if not work.again]
            self._out += [NoVerdict(work, why) for work in first]
            if keys := tuple(work.key for work in queue if work.again):
                self._out.append(Unproved(product, keys))
            queue.clear()

    def _width(self, gpus: int, product: str) -> int:
        """Return how many GPUs a seat for a case gets: at most as many as the largest node has."""
        return min(gpus, max((node.gpus for node in self.usable(product)), default=gpus))

    def _start_seats(self) -> None:
        # Cases with many GPUs come first, because later they would wait until enough GPUs are free.
        for product, queues in self._queues.items():
            for gpus in sorted((g for g in queues if queues[g]), reverse=True):
                width = self._width(gpus, product)
                seats = [s for s in self.seats.values() if s.node.product == product]
                idle = [s for s in seats if not s.queue and s.state != "finishing"]
                for _ in range(len(queues[gpus]) - sum(s.width == width for s in idle)):
                    if not self._start_seat(queues[gpus], product, width):
                        break

    def _start_seat(self, queue: deque[Work], product: str, width: int) -> bool:
        used: Counter[str] = Counter()
        for seat in self.seats.values():
            used[seat.node.id] += seat.width
        free = {n.id: n.gpus - used[n.id] for n in self.usable(product)}
        able = [n for n in free if free[n] >= width and any(self._may(n, w) for w in queue)]
        if not able:
            return False
        self._started += 1
        node = self.nodes[max(able, key=lambda node: free[node])]
        seat = Seat(f"{node.name}-{self._started}", node, width)
        self.seats[seat.id] = seat
        self._out.append(Start(seat.id, node.id, width))
        return True

    def _may(self, node_id: str, work: Work) -> bool:
        """Return whether a node may run `work`: a node to avoid may, if no other can."""
        if node_id not in self._avoid.get(work.key, ()):
            return True
        return all(node.id == node_id for node in self.usable(work.product))

    def _give(self) -> None:
        ready = [seat for seat in self.seats.values() if seat.state == "ready"]
        for seat in ready:
            if not seat.queue and not self._give_next(seat):
                seat.state = "finishing"
                self._out.append(Finish(seat.id))
        # A second queued case hides message latency. But the last cases must not wait in a queue.
        alike = Counter(seat.node.product for seat in self.seats.values())
        for seat in ready:
            one = len(seat.queue) == 1 and seat.queue[0].key not in self._where
            left = sum(map(len, self._fitting(seat))) if one else 0
            if left > alike[seat.node.product]:
                self._give_next(seat, behind=True)

    def _fitting(self, seat: Seat) -> list[deque[Work]]:
        """Return the queues of cases that need the seat's product and exactly its GPU count."""
        product = seat.node.product
        queues = self._queues[product]
        return [q for gpus, q in queues.items() if q and self._width(gpus, product) == seat.width]

    def _give_next(self, seat: Seat, *, behind: bool = False) -> bool:
        """Give a case to a seat. Return False if no case fits the seat.

        If the case would wait `behind` another one, skip cases during which a seat was lost.
        """
        for queue in self._fitting(seat):
            for work in queue:
                if self._may(seat.node.id, work) and not (behind and work.key in self._where):
                    queue.remove(work)
                    seat.queue.append(work)
                    self._out.append(Give(seat.id, work))
                    return True
        return False
