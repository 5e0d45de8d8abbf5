"""What the pytest process and a bench process say to each other: one JSON object a line.

A `Task` goes to the bench process; `progress` lines and one final `Reply` come back. Only plain
types cross, so that the two may run different interpreters, and a recorded reply can be replayed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

READY = "ready"
"""The progress line of a process that has started; time limits of requests count from it."""

AT = " at "
"""What a progress line has before the size at which something is done."""

Timing = Literal["check", "time", "count", "changed", "sample"]
Apart = Literal["draw", "perform", "compare"]
Other = Literal["compile", "profile", "peaks", "facts", "collectives", "stop"]
Kind = Timing | Apart | Other


@dataclass(frozen=True, kw_only=True)
class Task:
    """One request.

    Attributes:
        kind: what to do.
        page: path of the page; `root` and `module` say under which name to import it.
        function, variant, size, gpus: the case; case: its id, as pytest has it.
        side: for `sample`, the name of the one side to time; with `versus="old"` ``baseline`` or
            ``optimized``; for `count`, the one role to count, in a process of its own.
        goal: for `count`, what to count: a key of `metric_limits.METRICS`.
        device: ``cuda`` or ``cpu``.
        at: ``case`` checks the case's own size and a few fixed others, ``check`` the small ones
            only.
        rule: keywords of `numerics.Rule`.
        apart: for `draw`, `perform` and `compare`: files, clock, slots and units (`apart.py`).
        versus: ``baseline``, ``self`` for an A/A trial, ``old`` for the side as it was at a commit.
        past: for `changed` and ``old``: `root`, `page` and `module` of the page as it was.
        budget: keywords of `timing.Budget`.
        seed: from which the values of check sizes and the unseen ones are drawn; secret.
        replicate: number of the process among those that measure this case.
        keep: whether the expected results of a `replicate` are kept for the next task.
        planted: slowdown planted in the second side: this share of extra calls is not counted.
        audit: whether the profiler looks at the kernels of both sides too, after the windows.
        reproducible: deterministic algorithms only.
        timer: ``module:function`` of another timer with its options, or None for the device's own.
        archs: for `compile`, what to assemble for.
        profile: for `profile`, the folder that torch's profiler fills; with `side` instead, the
            role of the one side that runs for a profiler around its process.
        sweep: for `collectives`, `ops` and `sizes` in bytes.
        limit: seconds of silence allowed, also to the fresh process of a process side.
        search: whether strategies among the check sizes are searched.
        without: protections switched off; the exploits' tests prove each that way, nothing else.
    """

    kind: Kind
    page: str = ""
    root: str = ""
    module: str = ""
    function: str = ""
    variant: str = ""
    case: str = ""
    side: str = ""
    goal: str = ""
    size: Mapping[str, Any] = field(default_factory=dict)
    gpus: int = 1
    device: str = "cpu"
    at: Literal["case", "check"] = "case"
    rule: Mapping[str, Any] = field(default_factory=dict)
    apart: Mapping[str, Any] = field(default_factory=dict)
    versus: Literal["baseline", "self", "old"] = "baseline"
    past: Mapping[str, str] = field(default_factory=dict)
    budget: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    replicate: int = 0
    keep: bool = False
    planted: float = 0.0
    audit: bool = False
    reproducible: bool = False
    timer: Mapping[str, Any] | None = None
    archs: tuple[str, ...] = ()
    profile: str = ""
    sweep: Mapping[str, Any] = field(default_factory=dict)
    limit: float = 120.0
    search: bool = False
    without: tuple[str, ...] = ()

    def key(self) -> str:
        """Return what identifies the request in a recording."""
        what = asdict(self)
        where = {
            "root",
            "page",
            "seed",
            "device",
            "budget",
            "timer",
            "reproducible",
            "past",
            "keep",
            "limit",
        }
        return json.dumps({k: v for k, v in what.items() if k not in where}, sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One answer: a result, or an error with its kind.

    Attributes:
        error: ``wrong`` (a result is not what it should be), ``page`` (the page breaks a rule),
            ``side`` (a side raised), ``fault`` (and its process has lost its GPU), ``memory``,
            ``disturbed``, ``died``, ``timeout``, ``unrecorded`` (a recording holds no more of it);
            or None.
        message: the error in words, its last line what to do.
        at: the size at which the error happened; empty where it is the task's own.
        trace: the side's own lines.
        result: plain types.
        exhausted: whether this was its last answer: it keeps more of a GPU than its share.
    """

    error: str | None = None
    message: str = ""
    at: str = ""
    trace: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)
    exhausted: bool = False


def failed(error: str, message: str, doing: str, trace: str) -> Reply:
    """Return the reply of what failed during `doing`: at a size that is said apart."""
    what, _, size = doing.partition(AT)
    return Reply(error=error, message=f"{message} during: {what}", at=size, trace=trace)


def encode(message: Task | Reply | Mapping[str, Any]) -> bytes:
    """Return one line. Raises TypeError for anything but plain types, NaN included."""
    plain = asdict(message) if isinstance(message, (Task, Reply)) else dict(message)
    return json.dumps(_plain(plain), allow_nan=False).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Return the object of one line."""
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(f"not a message: {line[:80]!r}")
    return value


def task_from(plain: Mapping[str, Any]) -> Task:
    """Return the task that `encode` wrote."""
    return Task(**{**plain, "archs": tuple(plain["archs"]), "without": tuple(plain["without"])})


def _plain(value: Any) -> Any:
    """Return `value` with infinities as text and tuples as lists; refuse what is no plain type."""
    if isinstance(value, float) and type(value) is float:
        return value if value - value == 0 else str(value)
    if isinstance(value, str):
        return str(value)  # torch's version is a subclass
    if value is None or type(value) in (bool, int):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    raise TypeError(f"{type(value).__name__} is not a plain type: {value!r:.80}")
