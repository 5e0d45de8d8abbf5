"""The types of the scheduler: cases, nodes and seats, and the actions that it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


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


class Shape(NamedTuple):
    """The number of nodes of a seat, and the number of GPUs on each of them."""

    nodes: int
    width: int


@dataclass
class Node:
    """A machine with GPUs of one product, which gets work as long as `why_avoided` is empty.

    Attributes:
        versions: the versions of its driver and packages. Nodes share a case only if these agree.
        unreached: how often this node and another one could not connect to each other.
    """

    id: str
    name: str
    product: str
    gpus: int
    versions: str = ""
    losses: int = 0
    why_avoided: str = ""
    unreached: int = 0

    @property
    def alone(self) -> bool:
        """Whether the node shares no case with other nodes, because ports seem to be closed.

        A single failure may also mean that the other node has just died.
        """
        return self.unreached > 1


@dataclass
class Seat:
    """Some GPUs of a node or of several nodes, and the pytest process that runs cases on them.

    Attributes:
        nodes: the nodes. pytest runs on the first one.
        width: the number of GPUs on each node.
        state: ``starting``, ``ready`` or ``finishing``.
        heard: for each node, the time of its last message.
        queue: the unfinished cases of the seat. The first case is running.
        unproved: the finished cases whose verdicts wait for the seat's canary.
    """

    id: str
    nodes: tuple[Node, ...]
    width: int
    state: str = "starting"
    heard: list[float] = field(default_factory=list)
    queue: list[Work] = field(default_factory=list)
    unproved: list[Work] = field(default_factory=list)

    @property
    def product(self) -> str:
        return self.nodes[0].product

    @property
    def shape(self) -> Shape:
        return Shape(len(self.nodes), self.width)


@dataclass(frozen=True)
class Start:
    """Start a seat on `gpus` GPUs of each of `nodes`."""

    seat: str
    nodes: tuple[str, ...]
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
