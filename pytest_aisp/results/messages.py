"""The messages between the pytest process and its worker processes.

A `Task` goes to the worker process. `ProgressUpdate` messages and one `Reply` come back. Each has a
tag, which tells its type. Only plain types go through the pipe (`encoding`). So the two ends may
run different interpreters, and a recorded reply can be replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, TypeVar

from msgspec import Struct, convert
from msgspec.structs import replace

Json: TypeAlias = Any
"""Any JSON value: a number, a text, a list or a table."""

READY = "ready"
"""The first progress message of a process. When it arrives, the time limit of a task starts."""

AT = " at "
"""The text that separates the work from the size in a progress message."""

TIMEOUT_HINT = "give it longer with -o aisp_timeout_multiplier=2"
"""The last line of the message about a timeout."""


class Task(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """A request to a worker process.

    Attributes:
        device: ``cuda`` or ``cpu``.
        limit: seconds without a message after which the process is killed.
    """

    device: str = "cpu"
    limit: float = 120.0

    @property
    def kind(self) -> str:
        """The tag. Messages to the user name the work by this word too."""
        return str(self.__struct_config__.tag)


class PageSource(Struct, frozen=True, kw_only=True):
    """A page's file, the root of its tree, and the module name to import it as."""

    page: str
    root: str
    module: str


class CaseTask(Task, frozen=True, kw_only=True):
    """A request about one case of a page.

    Attributes:
        page, root, module: path of the page, root of its tree, and the page's import name.
        function, variant, size, gpus: the test function and the parameters of the case.
        case: pytest id of the case.
        at: the sizes to check: ``case`` for the case's own size and a few fixed ones, ``check``
            for small ones only.
        rule: keyword arguments for `numerics.Rule`.
        seed: secret seed of the input values at check sizes, and of values that no side has seen.
        reproducible: use deterministic algorithms only.
        without: protections to switch off. Only the tests of exploits use this.
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
    """Check both sides against the reference. With `search`, also look for sizes that fail.

    With `baseline_alone`, the variant does not run.
    """

    search: bool = False
    baseline_alone: bool = False


class TimeTask(CaseTask, frozen=True, kw_only=True, tag="time"):
    """Time two sides against each other.

    Attributes:
        versus: the comparison: ``baseline`` for the two sides, ``self`` for an A/A trial, ``old``
            for a side against its version at a commit.
        side: for ``old``, the role of that side.
        past: for ``old``, the page at the commit.
        budget: keyword arguments for `schedule.Budget`.
        replicate: number of this process among those that measure the case.
        keep: with a `replicate` above 0, keep the expected results for the next task.
        planted: slowdown to plant in the second side, as a share of its calls. That many more
            calls are timed but not counted.
        audit: profile the kernels of both sides after the last timing window.
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


class HoldTask(CaseTask, frozen=True, kw_only=True, tag="hold"):
    """Build two copies of the role `side`, and keep them ready to be timed window by window.

    Attributes:
        other: True in the other environment. A simulated timer needs to know it.
        lap: number of the lap. In the first one, the copies are first built without timing.
        known: the clock and the calls of both copies' windows, if they have been chosen before.
    """

    side: str
    other: bool = False
    lap: int = 0
    known: tuple[str, list[int]] | None = None
    budget: Mapping[str, Json] = {}
    replicate: int = 0
    timer: Mapping[str, Json] | None = None


class WindowTask(CaseTask, frozen=True, kw_only=True, tag="window"):
    """Time a window of `copy` 0 or 1 of the held side. With `refresh`, first write new values.

    Before the ``last`` block, some of them are values that no side has seen.
    """

    copy: int
    refresh: Literal["", "values", "last"] = ""


class ReleaseTask(CaseTask, frozen=True, kw_only=True, tag="release"):
    """Compare the outputs of the held side's last calls with the reference, and release it.

    Unless it is the `last` lap, the process keeps its memory for the next one.
    """

    last: bool = True


class CountTask(CaseTask, frozen=True, kw_only=True, tag="count"):
    """Measure a metric of `metric_limits.METRICS`. For process sides, measure only `side`."""

    metric: str
    side: str = ""
    budget: Mapping[str, Json] = {}
    timer: Mapping[str, Json] | None = None


class ChangedTask(CaseTask, frozen=True, kw_only=True, tag="changed"):
    """Name the sides whose sources differ from `past`, the page at a commit.

    With `arch`, also compare what they launch there. Without `past`, name the sides that a recorded
    run compared with a commit, or with `arch`, return digests of the machine code. With `sass`,
    only return the difference of the SASS of the side with this role.
    """

    past: PageSource | None
    arch: str = ""
    sass: str = ""


class SampleTask(CaseTask, frozen=True, kw_only=True, tag="sample"):
    """Time the process side named `side` in this process. With `past`, use that page's side."""

    side: str
    past: PageSource | None = None


class CompileTask(CaseTask, frozen=True, kw_only=True, tag="compile"):
    """Assemble every kernel of the case for each of `archs`."""

    archs: tuple[str, ...]


class ProfileTask(CaseTask, frozen=True, kw_only=True, tag="profile"):
    """Profile both sides with torch into `folder`. If another profiler is used, only run `side`."""

    folder: str = ""
    side: str = ""


class FactsTask(CaseTask, frozen=True, kw_only=True, tag="facts"):
    """Report library versions and the device as the process sees them."""


class DrawTask(CaseTask, frozen=True, kw_only=True, tag="draw"):
    """Write input values to the file `values`: for a sandboxed side, or `count` new sets."""

    values: str
    count: int = 0


class PrepareTask(CaseTask, frozen=True, kw_only=True, tag="prepare"):
    """Get the role `side` ready in the sandbox, with as many `slots` as were timed.

    With ``clock="graph"``, a unit of work is a graph of `counted` calls. Otherwise it is one call.
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
    """Measure the machine's peak rates, or each level of its memory hierarchy."""

    hierarchy: bool = False


class CollectivesTask(Task, frozen=True, kw_only=True, tag="collectives"):
    """Time the collectives `ops` at `sizes` in bytes."""

    ops: tuple[str, ...]
    sizes: tuple[int, ...]


class DiagnoseTask(CaseTask, frozen=True, kw_only=True, tag="diagnose"):
    """Record when each rank reaches the collectives of both sides, or without a page of a loop."""


class StopTask(Task, frozen=True, kw_only=True, tag="stop"):
    """End the process."""


def case_fields(task: CaseTask) -> dict[str, Json]:
    """Return the fields that are the same in every task about the case."""
    return {name: getattr(task, name) for name in CaseTask.__struct_fields__}


class ProgressUpdate(Struct, frozen=True, tag="progress"):
    """The current work of the process. Each message also restarts the time limit."""

    text: str


class RankStarted(Struct, frozen=True, tag="rank started"):
    """The first message of a rank: its number and its process id."""

    rank: int
    pid: int


class RankStep(Struct, frozen=True, tag="rank step"):
    """The number of agreements that a rank has reached with the other ranks."""

    number: int


Result = TypeVar("Result")

ErrorKind = Literal[
    "wrong",
    "page",
    "side",
    "fault",
    "memory",
    "disturbed",
    "traced",
    "died",
    "timeout",
    "unrecorded",
]
"""``wrong``: a result is wrong. ``page``: the page breaks a rule. ``side``: a side raised an
exception. ``fault``: a side raised an exception, and its process can no longer use its GPU.
``disturbed``: the machine disturbed the measurement. ``traced``: a debugger or a profiler runs in
the process. ``unrecorded``: a replayed run has no more samples."""


class Reply(Struct, frozen=True, kw_only=True, tag="reply"):
    """The answer to a task: a result, or an error.

    Attributes:
        error, message: the kind of error, or None, and its words. The last line is the remedy.
        at, trace: the size, unless it is the task's own, and the traceback lines of the page.
        result: one of `task_results`. After a pipe it has plain types, which `read` converts.
        exhausted: True if the process uses more GPU memory than its share and must be replaced.
        code: the reason that the exception itself names, for `aisp judge`.
    """

    error: ErrorKind | None = None
    message: str = ""
    at: str = ""
    trace: str = ""
    result: Json = {}
    exhausted: bool = False
    code: str = ""

    def read(self, kind: type[Result]) -> Result:
        """Return the result as `kind`, the result of the task."""
        return convert(self.result, kind, strict=False)  # infinities are sent as text


Answer: TypeAlias = ProgressUpdate | RankStarted | RankStep | Reply
"""Every message that a worker process sends."""


def failed(error: ErrorKind, message: str, doing: str, trace: str) -> Reply:
    """Return the reply for a failure during `doing`, a progress message."""
    work, _, size = doing.partition(AT)
    return Reply(error=error, message=f"{message} during: {work}", at=size, trace=trace)


def timeout_reply(seconds: float, doing: str, trace: str) -> Reply:
    """Return the reply for a task that was not answered within `seconds`."""
    reply = failed("timeout", f"no answer within {seconds:g} s", doing, trace)
    return replace(reply, message=f"{reply.message}\n{TIMEOUT_HINT}")
