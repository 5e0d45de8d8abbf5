"""The messages between the pytest process and its worker processes: one JSON object a line.

A `Task` goes to the worker process. `ProgressUpdate` messages and one `Reply` come back. Each class
has a tag, and both ends dispatch on the type. Only plain types go through the pipe. So the two ends
may run different interpreters, and a recorded reply can be replayed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Struct

Json: TypeAlias = Any
"""A JSON value of no fixed type: numbers, text, lists and tables."""

READY = "ready"
"""The first progress message of a process. The time limit of a task starts when it arrives."""

AT = " at "
"""The text between the work and the size in a progress message."""


class Task(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """A request.

    Attributes:
        device: ``cuda`` or ``cpu``.
        limit: seconds without a message after which the process is killed.
    """

    device: str = "cpu"
    limit: float = 120.0

    @property
    def kind(self) -> str:
        """The tag, which is also the word for the work in messages to the user."""
        return str(self.__struct_config__.tag)


class PageSource(Struct, frozen=True, kw_only=True):
    """A page's file, the root of its tree, and the module name to import it as."""

    page: str
    root: str
    module: str


class CaseTask(Task, frozen=True, kw_only=True):
    """A request about one case of a page.

    Attributes:
        page: path of the page. `root` is the root of its tree, `module` its import name.
        function, variant, size, gpus: the case. `case` is its pytest id.
        at: ``case`` checks the case's own size and a few fixed ones, ``check`` small ones only.
        rule: keywords of `numerics.Rule`.
        seed: secret seed of the values at check sizes and of unseen values.
        reproducible: use deterministic algorithms only.
        without: protections to switch off. Only the tests of exploits do that.
    """

    page: str = ""
    root: str = ""
    module: str = ""
    function: str = ""
    variant: str = ""
    case: str = ""
    size: Mapping[str, Json] = {}
    gpus: int = 1
    at: Literal["case", "check"] = "case"
    rule: Mapping[str, Json] = {}
    seed: int = 0
    reproducible: bool = False
    without: tuple[str, ...] = ()


class CheckTask(CaseTask, frozen=True, kw_only=True, tag="check"):
    """Check both sides against the reference; `search` looks for failing sizes too."""

    search: bool = False


class TimeTask(CaseTask, frozen=True, kw_only=True, tag="time"):
    """Time two sides against each other.

    Attributes:
        versus: ``baseline``, ``self`` for an A/A trial, ``old`` for a side at a commit.
        side: for ``old``, the role of that side.
        past: for ``old``, the page at the commit.
        budget: keywords of `schedule.Budget`.
        replicate: number of this process among those that measure the case.
        keep: keep the expected results of a `replicate` for the next task.
        planted: slowdown planted in the second side, as a share of calls that are timed but not
            counted.
        audit: profile the kernels of both sides after the last window.
        timer: ``target`` (module:function) and ``options`` of a timer other than the device's own.
    """

    versus: Literal["baseline", "self", "old"] = "baseline"
    side: str = ""
    past: PageSource | None = None
    budget: Mapping[str, Json] = {}
    replicate: int = 0
    keep: bool = False
    planted: float = 0.0
    audit: bool = False
    timer: Mapping[str, Json] | None = None


class CountTask(CaseTask, frozen=True, kw_only=True, tag="count"):
    """Count a metric of `metric_limits.METRICS`; for process sides, only of the role `side`."""

    metric: str
    side: str = ""
    budget: Mapping[str, Json] = {}
    timer: Mapping[str, Json] | None = None


class ChangedTask(CaseTask, frozen=True, kw_only=True, tag="changed"):
    """Name the sides whose sources differ from `past`, the page at a commit."""

    past: PageSource


class SampleTask(CaseTask, frozen=True, kw_only=True, tag="sample"):
    """Time the process side named `side` in this process; with `past`, the side of that page."""

    side: str
    past: PageSource | None = None


class CompileTask(CaseTask, frozen=True, kw_only=True, tag="compile"):
    """Assemble every kernel of the case for each of `archs`."""

    archs: tuple[str, ...]


class ProfileTask(CaseTask, frozen=True, kw_only=True, tag="profile"):
    """Profile both sides with torch into `folder`, or only run the role `side` under a profiler."""

    folder: str = ""
    side: str = ""


class FactsTask(CaseTask, frozen=True, kw_only=True, tag="facts"):
    """Report library versions and the device as the process sees them."""


class DrawTask(CaseTask, frozen=True, kw_only=True, tag="draw"):
    """Draw input values for a sandboxed side and write them to the file `values`."""

    values: str


class PrepareTask(CaseTask, frozen=True, kw_only=True, tag="prepare"):
    """Get the role `side` ready in the sandbox, with as many `slots` as were timed.

    With ``clock="graph"`` a unit of work is a graph of `counted` calls, else one call.
    """

    side: str
    clock: str
    counted: int
    slots: int


class PerformTask(CaseTask, frozen=True, kw_only=True, tag="perform"):
    """Do `units` of work in the sandbox."""

    side: str
    units: int


class ShowTask(CaseTask, frozen=True, kw_only=True, tag="show"):
    """Run the sandboxed side on the file `values`; write the outputs of `slots` to `outputs`."""

    side: str
    values: str
    outputs: str
    slots: tuple[int, ...]


class CompareTask(CaseTask, frozen=True, kw_only=True, tag="compare"):
    """Compare the file `outputs` of the role `side` with the reference after `steps` calls."""

    side: str
    outputs: str
    steps: int


class PeaksTask(Task, frozen=True, kw_only=True, tag="peaks"):
    """Measure the machine's peak rates."""


class CollectivesTask(Task, frozen=True, kw_only=True, tag="collectives"):
    """Time the collectives `ops` at `sizes` in bytes."""

    ops: tuple[str, ...]
    sizes: tuple[int, ...]


class StopTask(Task, frozen=True, kw_only=True, tag="stop"):
    """End the process."""


AnyTask: TypeAlias = (
    CheckTask
    | TimeTask
    | CountTask
    | ChangedTask
    | SampleTask
    | CompileTask
    | ProfileTask
    | FactsTask
    | DrawTask
    | PrepareTask
    | PerformTask
    | ShowTask
    | CompareTask
    | PeaksTask
    | CollectivesTask
    | StopTask
)
"""Every request that a worker process answers."""


def case_fields(task: CaseTask) -> dict[str, Json]:
    """Return the fields that every task about the same case shares."""
    return {name: getattr(task, name) for name in CaseTask.__struct_fields__}


class ProgressUpdate(Struct, frozen=True, tag="progress"):
    """What the process is doing now. It also renews the time limit."""

    text: str


class RankStarted(Struct, frozen=True, tag="rank started"):
    """The first message of a rank: its number and its process id."""

    rank: int
    pid: int


class RankStep(Struct, frozen=True, tag="rank step"):
    """How many agreements with the other ranks a rank has reached."""

    number: int


Result = TypeVar("Result")

ErrorKind = Literal[
    "wrong", "page", "side", "fault", "memory", "disturbed", "died", "timeout", "unrecorded"
]
"""``wrong``: a result is wrong.

``page``: the page breaks a rule. ``side``: a side raised. ``fault``: a side raised, and its process
lost its GPU. ``unrecorded``: the recording has ended.
"""


class Reply(Struct, frozen=True, kw_only=True, tag="reply"):
    """The answer to a task: a result, or an error.

    Attributes:
        error: the kind of error, or None.
        message: the error in words. The last line says what to do.
        at: the size at which the error happened; empty for the task's own size.
        trace: the traceback lines of the page.
        result: one of `task_results`, in plain types if it has crossed a pipe. See `read`.
        exhausted: the process holds more GPU memory than its share and must be replaced.
    """

    error: ErrorKind | None = None
    message: str = ""
    at: str = ""
    trace: str = ""
    result: Json = {}
    exhausted: bool = False

    def read(self, kind: type[Result]) -> Result:
        """Return the result as `kind`, the result of the task."""
        return msgspec.convert(self.result, kind, strict=False)  # infinities are text


Answer: TypeAlias = ProgressUpdate | RankStarted | RankStep | Reply
"""Every message that a worker process sends."""


def failed(error: ErrorKind, message: str, doing: str, trace: str) -> Reply:
    """Return the reply for a failure during `doing`, a progress message."""
    work, _, size = doing.partition(AT)
    return Reply(error=error, message=f"{message} during: {work}", at=size, trace=trace)


def encode(message: Task | Answer) -> bytes:
    """Return one line. Raises TypeError for values that are no plain types."""
    return json.dumps(plain(message)).encode() + b"\n"


def decode(line: bytes) -> Answer:
    """Return the message that a worker process sent."""
    answer: Answer = msgspec.convert(json.loads(line), Answer)
    return answer


def decode_task(line: bytes) -> AnyTask:
    """Return the task that `encode` wrote."""
    task: AnyTask = msgspec.convert(json.loads(line), AnyTask)
    return task


def plain(value: Json) -> Json:
    """Return `value` with infinities as text and tuples as lists; other types raise TypeError."""
    if isinstance(value, float) and type(value) is float:
        return value if value - value == 0 else str(value)
    if isinstance(value, str):
        return str(value)  # torch's version is a subclass
    if value is None or type(value) in (bool, int):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, Struct):
        config = value.__struct_config__
        tag = {config.tag_field: config.tag} if config.tag is not None else {}
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        return tag | {name: plain(v) for name, v in fields.items() if v is not UNSET}
    raise TypeError(f"{type(value).__name__} is not a plain type: {value!r:.80}")
