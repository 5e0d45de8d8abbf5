"""The cost of a side, which predicts its time: the bytes, operations and launches of one call."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from .pair import (
    ARITHMETIC,
    Pair,
    PairError,
    Side,
    Size,
    Work,
    require_known,
    side_name,
    size_words,
)

UNITS = ("l2", "shared", "atomics", "sfu", "blocks")
"""The attributes of `Cost` that use a unit of the GPU. The rates have the same names."""
HOST = {"launches": "launch", "host_steps": "host_step"}
"""The attributes of `Cost` that take time on the host, each with the name of a rate."""
AMOUNTS = (
    *("read", "write", "in_flight", *UNITS, "h2d", "d2h", "sent", "nccl"),
    *(*HOST, "graph_nodes", "syncs", "collectives", "barriers"),
)
"""All attributes of `Cost` that are plain numbers."""
ALL_SIDES = r"\b(?i:all|both|each|every|no|other)\s+(?:\w+\s+)?(?:kernel|rung|side|variant)s?\b"
"""A phrase in the section `Seen` that names all sides, or all but those named elsewhere in it."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The resources that one call of a side uses, all at the same time.

    ``a + b`` means that `b` starts after `a` has ended, so the times add up. ``8 * a`` means that
    `a` runs eight times, one after another.

    Attributes:
        read, write: bytes read from and written to DRAM.
        in_flight: the bytes that the loads of one SM request from DRAM at the same time, at most.
            A kernel with 2048 threads per SM and one load of 4 bytes per thread has 8192. Leave it
            out if the loads keep DRAM busy: twice as many bytes gain little.
        l2: bytes read from and written to the L2, in whole sectors of 32 bytes. Count DRAM traffic
            here only if the L2 is the limit.
        shared: bytes read from and written to shared memory. If `k` threads of a warp access
            different words of one bank, each accessed byte counts `k` times.
        atomics: atomic additions to global memory.
        sfu: exponentials, logarithms, sines, roots and reciprocals of fp32.
        blocks: thread blocks started. Count blocks only if each block does little work.
        h2d, d2h: bytes copied to and from the GPU.
        sent: bytes that each rank copies to other GPUs.
        nccl: bytes that each rank sends in NCCL collectives.
        ops: arithmetic operations by type, as in ``{"bf16": 2 * n**3}``.
        launches: kernels launched. The replay of a graph is one launch.
        graph_nodes: kernels in the CUDA graphs that the side itself replays.
        host_steps: calls of torch that launch nothing, such as views.
        syncs: number of times that the host waits for the GPU, as in `.item()`.
        collectives: number of NCCL collectives to wait for. Count the bytes in `nccl`.
        barriers: number of times that a kernel waits for signals from other GPUs.
        then: the costs that follow, one after another, as ``+`` and ``*`` set them.

    Raises:
        PairError: if an amount is negative, or a type is unknown.
    """

    read: float = 0
    write: float = 0
    in_flight: float = 0
    h2d: float = 0
    d2h: float = 0
    sent: float = 0
    nccl: float = 0
    l2: float = 0
    shared: float = 0
    atomics: float = 0
    sfu: float = 0
    blocks: float = 0
    ops: Mapping[str, float] = field(default_factory=dict)
    launches: float = 0
    graph_nodes: float = 0
    host_steps: float = 0
    syncs: float = 0
    collectives: float = 0
    barriers: float = 0
    then: tuple[Cost, ...] = ()

    def __post_init__(self) -> None:
        require_known("type in Cost(ops=)", list(self.ops), ARITHMETIC)
        amounts = {name: getattr(self, name) for name in AMOUNTS}
        for name, value in {**amounts, **self.ops}.items():
            if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise PairError(f"Cost({name}={value!r}) must be a number >= 0")

    def phases(self) -> tuple[Cost, ...]:
        """Return the parts that run one after another, each as a `Cost` without `then`."""
        return (replace(self, then=()), *self.then)

    def amounts(self) -> list[dict[str, object]]:
        """Return the nonzero attributes of each phase, by name."""
        names = (*AMOUNTS, "ops")
        phases = [{name: getattr(phase, name) for name in names} for phase in self.phases()]
        return [{name: value for name, value in phase.items() if value} for phase in phases]

    def __add__(self, other: Cost) -> Cost:
        return self._followed_by(other.phases())

    def __mul__(self, times: int) -> Cost:
        if not isinstance(times, int) or times < 1:
            raise PairError(f"{times!r} * Cost(...) must repeat it at least once")
        return self._followed_by(self.phases() * (times - 1))

    __rmul__ = __mul__

    def _followed_by(self, more: tuple[Cost, ...]) -> Cost:
        return replace(self, then=self.then + more)

    def total(self, name: str) -> float:
        """Return the sum of the amount `name` over all phases."""
        return float(sum(getattr(phase, name) for phase in self.phases()))


def memory_rates(read: float, write: float) -> dict[str, float]:
    """Split the `read` and `write` bytes by memory rate: ``copy``, ``read`` and ``write``.

    A copy reads and writes equally many bytes. All other bytes are only read or only written.
    """
    both = min(read, write)
    return {"copy": 2 * both, "read": read - both, "write": write - both}


Costs: TypeAlias = Mapping[Side, Callable[..., Cost]]
"""One function per side. The function takes a size's keys and returns the cost of a call."""


def validate_costs(costs: Costs, sides: list[Side]) -> None:
    """Raise `PairError` if a key of `costs` is not a side, or a value is not a function."""
    names = [side_name(side) for side in sides]
    for side, function in costs.items():
        if not callable(function):
            raise PairError(
                f"costs[{side_name(side)}] is {function!r}; write a function of the size, as in"
                f" {side_name(side)}: lambda n: Cost(read=4 * n, write=4 * n)"
            )
        if side not in sides:
            raise PairError(
                f"{place_of(function)}: costs= has {side_name(side)!r}, which is not a side of this"
                f" page; its sides are {', '.join(names)}"
            )


def cost_at(pair: Pair, side: Side, size: Size, world: int) -> Cost | None:
    """Return the cost of a call of `side` at `size`, or None if the page declares none.

    Raises:
        PairError: if the function does not return a `Cost`, or if the cost is empty or below the
            declared work. The message begins with the file and line of the function.
    """
    function = pair.costs.get(side)
    if function is None:
        return None
    name, place, at = side_name(side), place_of(function), size_words(size)
    given = {**size, "world": world} if "world" in inspect.signature(function).parameters else size
    try:
        cost = function(**given)
    except (PairError, TypeError) as error:
        unknown = "Cost.__init__() got an unexpected keyword" in str(error)
        legal = f"; legal: {', '.join((*AMOUNTS, 'ops'))}" if unknown else ""
        raise PairError(f"{place}: the cost of {name} at {at}: {error}{legal}") from None
    if not isinstance(cost, Cost):
        raise PairError(f"{place}: the cost of {name} is {cost!r}; return a Cost")
    if not any(cost.amounts()):
        raise PairError(
            f"{place}: {name} costs nothing at {at}; a call at least launches a kernel:"
            " Cost(launches=1)"
        )
    for resource, needed, paid in _declared(pair.work_at(size, world), cost):
        if paid < needed:
            raise PairError(
                f"{place}: {name} costs {paid:g} {resource} at {at}, but work= says that any"
                f" implementation needs {needed:g}; correct one of the two"
            )
    return cost


def seen_section(doc: str | None) -> str:
    """Return the text of the section `Seen` of a page's docstring, or "" if there is none."""
    found = re.search(
        r"^Seen {2,}(.*(?:\n(?:[ \t].*)?)*)", inspect.cleandoc(doc or ""), re.MULTILINE
    )
    return found[1].rstrip() if found else ""


def is_seen(side: str, role: str, seen: str) -> bool:
    """Return whether the text `seen` names the side or its role, or speaks of all sides."""
    return re.search(rf"\b(?:{re.escape(side)}|{role})\b|{ALL_SIDES}", seen) is not None


def _declared(work: Work, cost: Cost) -> tuple[tuple[str, float, float], ...]:
    """Return (name, amount in `work`, amount in `cost`) for each resource of `work`."""
    ops = sum(sum(phase.ops.values()) for phase in cost.phases())
    wire = cost.total("h2d") + cost.total("d2h") + cost.total("sent") + cost.total("nccl")
    return (
        ("bytes read", work.read, cost.total("read")),
        ("bytes written", work.write, cost.total("write")),
        ("operations", sum(work.flops.values()), ops),
        ("bytes over a link", work.wire, wire),
    )


def place_of(function: Callable[..., object]) -> str:
    """Return the file and the line of `function`, a function of `costs`."""
    code = inspect.unwrap(function).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"
