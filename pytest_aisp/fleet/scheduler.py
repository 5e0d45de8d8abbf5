"""Decide which case runs on which GPUs: the queues, nodes and seats of a fleet, without Ray.

A seat is a set of GPUs, with one pytest process that runs cases one after another. Its GPUs are of
one node, unless a case may span several. The scheduler receives events, and `plan` returns actions
to execute and findings to report. The scheduler reads no clock: each time is an argument, in
seconds.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from itertools import groupby

from .scheduler_types import (
    Action,
    Finish,
    Give,
    Kill,
    Node,
    Note,
    NoVerdict,
    Seat,
    Shape,
    Start,
    Unproved,
    Work,
)

ATTEMPTS = 2
"""A case is given up if this many seats were lost while they ran it."""
LOSSES = 2
"""A node that lost this many seats gets no more work."""
SILENCE = 30.0
"""A seat that is silent for this many seconds counts as lost. Seats report every 2 s."""


class Scheduler:
    """Distributes cases over nodes.

    Args:
        works: the cases, in the order in which they should run.
        patience: seconds to wait if a product has no node.
        span: whether a case that needs more GPUs than any node has may span several nodes.
    """

    def __init__(self, works: list[Work], patience: float, *, span: bool = False) -> None:
        self.patience, self.span = patience, span
        self.nodes: dict[str, Node] = {}
        self.seats: dict[str, Seat] = {}
        self._queues: dict[str, dict[int, deque[Work]]] = defaultdict(lambda: defaultdict(deque))
        self._lacking: dict[str, float] = {}  # by product: the time since which it has had no node
        self._where: dict[str, list[str]] = defaultdict(list)  # by case: nodes lost while it ran
        self._avoid: dict[str, set[str]] = defaultdict(set)  # by case: ids of nodes to avoid
        self._too_wide: set[tuple[str, int]] = set()  # products, and counts of GPUs that none has
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
        for seat in [seat for seat in self.seats.values() if node in seat.nodes]:
            self.lost(seat.id, why, seat.nodes.index(node))

    def ready(self, seat_id: str, now: float) -> None:
        """Note that a seat's pytest has collected its cases."""
        if (seat := self.seats.get(seat_id)) is not None:
            seat.state, seat.heard = "ready", [now for _ in seat.nodes]

    def heard(self, seat_id: str, now: float, part: int = 0) -> None:
        """Note that a seat is alive on its node number `part`."""
        if (seat := self.seats.get(seat_id)) is not None and seat.heard:
            seat.heard[part] = now

    def unreachable(self, seat_id: str, why: str) -> None:
        """Note that the nodes of a new seat cannot connect to each other."""
        if (seat := self.seats.pop(seat_id, None)) is not None:
            for node in seat.nodes:
                node.unreached += 1
            alone = [node.name for node in seat.nodes if node.alone]
            names = f"{' and '.join(alone)} share{'s' * (len(alone) == 1)} no case with other nodes"
            self._out += [Kill(seat.id), Note(f"{names if alone else 'once more'}: {why}")]

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

    def lost(self, seat_id: str, why: str, part: int = 0) -> None:
        """Note that a seat ended unexpectedly. Its cases run again, on another node if possible.

        Args:
            part: the number of the seat's node that caused this.
        """
        # The last messages may be lost too, so any case in the queue may have been running. When a
        # case of this queue runs again, no other case waits behind that case in the seat.
        if (seat := self.seats.pop(seat_id, None)) is None:
            return
        node, proving = seat.nodes[part], [w for w in seat.unproved if not w.again]
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
        self._avoid[work.key] |= {node.id for node in seat.nodes}
        self._queues[work.product][work.gpus].append(
            Work(work.key, work.product, work.gpus, again=True)
        )

    def has_others(self, seat: Seat) -> bool:
        """Return whether other nodes than those of `seat` can hold a seat of the same shape."""
        team = self._team(seat.product, seat.shape)
        return sum(node not in seat.nodes for node in team) >= len(seat.nodes)

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
            oldest = min(seat.heard, default=now)
            if seat.state != "starting" and now - oldest > SILENCE:
                part = seat.heard.index(oldest)
                self.lost(seat.id, f"it was silent for {SILENCE:.0f} s", part)
                self._avoid_node(seat.nodes[part], "it does not answer")
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
            alive = any(seat.product == product for seat in self.seats.values())
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

    def _team(self, product: str, shape: Shape) -> list[Node]:
        """Return the nodes that can hold a seat of this `shape`, if not all of them are busy.

        Nodes that share a case have the same versions. If there are several such sets of nodes,
        this is the largest.
        """
        wide = [node for node in self.usable(product) if node.gpus >= shape.width]
        if shape.nodes == 1:
            return wide
        wide = sorted((n for n in wide if not n.alone), key=lambda node: node.versions)
        sets = [list(same) for _, same in groupby(wide, key=lambda node: node.versions)]
        return max(sets, key=len, default=[])

    def _shape(self, gpus: int, product: str) -> Shape:
        """Return the shape of a seat for a case on `gpus` GPUs.

        If no node and no group of nodes can run the case, the seat is the largest node, which then
        only checks the case.
        """
        usable = self.usable(product)
        largest = max((node.gpus for node in usable), default=gpus)
        if gpus <= largest or not self.span:
            return Shape(1, min(gpus, largest))
        for count in range(2, len(usable) + 1):
            shape = Shape(count, gpus // count)
            if gpus % count == 0 and len(self._team(product, shape)) >= count:
                return shape
        if (product, gpus) not in self._too_wide:
            self._too_wide.add((product, gpus))
            nodes = ", ".join(f"{node.name} x {node.gpus}" for node in usable)
            self._out.append(
                Note(
                    f"cases on {gpus} GPUs are only checked: no nodes of {product} with the same"
                    f" versions can give {gpus} GPUs in equal shares ({nodes})"
                )
            )
        return Shape(1, largest)

    def _start_seats(self) -> None:
        # Cases with many GPUs come first, because later they would wait until enough GPUs are free.
        for product, queues in self._queues.items():
            for gpus in sorted((g for g in queues if queues[g]), reverse=True):
                shape = self._shape(gpus, product)
                seats = [s for s in self.seats.values() if s.product == product]
                idle = [s for s in seats if not s.queue and s.state != "finishing"]
                for _ in range(len(queues[gpus]) - sum(s.shape == shape for s in idle)):
                    if not self._start_seat(queues[gpus], product, shape):
                        break

    def _start_seat(self, queue: deque[Work], product: str, shape: Shape) -> bool:
        used: Counter[str] = Counter()
        for seat in self.seats.values():
            for node in seat.nodes:
                used[node.id] += seat.width
        free = {node.id: node.gpus - used[node.id] for node in self._team(product, shape)}
        able = [node for node in free if free[node] >= shape.width]
        for work in queue if len(able) >= shape.nodes else ():
            fit = [node for node in able if self._may(node, work, shape)]
            if len(fit) >= shape.nodes:
                chosen = sorted(fit, key=lambda node: -free[node])[: shape.nodes]
                self._start_seat_on([self.nodes[node] for node in sorted(chosen)], shape.width)
                return True
        return False

    def _start_seat_on(self, nodes: list[Node], width: int) -> None:
        # The nodes are in one order in all seats, because a case takes their leases in this order.
        self._started += 1
        seat = Seat(f"{nodes[0].name}-{self._started}", tuple(nodes), width)
        self.seats[seat.id] = seat
        self._out.append(Start(seat.id, tuple(node.id for node in nodes), width))

    def _may(self, node_id: str, work: Work, shape: Shape) -> bool:
        """Return whether a node may run `work`: a node to avoid may, if too few others can."""
        avoided = self._avoid.get(work.key, ())
        if node_id not in avoided:
            return True
        team = self._team(work.product, shape)
        return sum(node.id not in avoided for node in team) < shape.nodes

    def _give(self) -> None:
        ready = [seat for seat in self.seats.values() if seat.state == "ready"]
        for seat in ready:
            if not seat.queue and not self._give_next(seat):
                seat.state = "finishing"
                self._out.append(Finish(seat.id))
        # A second queued case hides message latency. But the last cases must not wait in a queue.
        alike = Counter(seat.product for seat in self.seats.values())
        for seat in ready:
            one = len(seat.queue) == 1 and seat.queue[0].key not in self._where
            left = sum(map(len, self._fitting(seat))) if one else 0
            if left > alike[seat.product]:
                self._give_next(seat, behind=True)

    def _fitting(self, seat: Seat) -> list[deque[Work]]:
        """Return the queues of cases that need the seat's product and exactly its GPUs."""
        queues = self._queues[seat.product].items()
        return [q for gpus, q in queues if q and self._shape(gpus, seat.product) == seat.shape]

    def _give_next(self, seat: Seat, *, behind: bool = False) -> bool:
        """Give a case to a seat. Return False if no case fits the seat.

        If the case would wait `behind` another one, skip cases during which a seat was lost.
        """
        for queue in self._fitting(seat):
            for work in queue:
                may = all(self._may(node.id, work, seat.shape) for node in seat.nodes)
                if may and not (behind and work.key in self._where):
                    queue.remove(work)
                    seat.queue.append(work)
                    self._out.append(Give(seat.id, work))
                    return True
        return False
