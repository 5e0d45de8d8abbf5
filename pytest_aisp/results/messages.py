"""The messages between the pytest process and its worker processes.

The pytest process sends a `Task`. The worker sends `ProgressUpdate` messages, and then one `Reply`.
Every message has a tag that names its type. Messages contain only JSON types (`encoding`), so the
two processes may run different Python versions, and a recorded reply can be replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, TypeVar

from msgspec import Struct, convert
from msgspec.structs import replace

Json: TypeAlias = Any
"""Any JSON value, such as a number, a string, a list or an object."""
READY = "ready"
"""The first progress message of a process. The time limit of a task starts with this message."""
AT = " at "
"""The separator between the work and the size in a progress message, as in ``check at n=64``."""

TIMEOUT_HINT = "allow more time with -o aisp_timeout_multiplier=2"
"""The last line of the message about a timeout."""


class Task(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """A request to a worker process.

    Attributes:
        device: ``cuda`` or ``cpu``.
        limit: the process is killed if it sends no message for this many seconds.
    """

    device: str = "cpu"
    limit: float = 120.0

    @property
    def kind(self) -> str:
        """The tag, such as ``check``, which also names the work in messages to the user."""
        return str(self.__struct_config__.tag)


class PageSource(Struct, frozen=True, kw_only=True):
    """The file of a page, the root of its source tree, and the name under which to import it."""

    page: str
    root: str
    module: str


class CaseTask(Task, frozen=True, kw_only=True):
    """A request about one case of a page.

    Attributes:
        page, root, module: path of the page, root of its source tree, and the page's import name.
        function, variant, size, gpus: the test function and the parameters of the case.
        case: pytest id of the case.
        at: the sizes to check: ``case`` (the case's own and a few fixed ones) or ``check`` (small).
        rule: keyword arguments for `numerics.Rule`.
        seed: secret seed for inputs at check sizes, and for values drawn after the preparation.
        reproducible: True to use only deterministic algorithms.
        without: protections to switch off, for this project's tests of exploits.
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
    """Check both sides against the reference. With `baseline_alone`, check only the baseline.

    With `search`, also look for other sizes at which a side fails.
    """

    search: bool = False
    baseline_alone: bool = False


class TimeTask(CaseTask, frozen=True, kw_only=True, tag="time"):
    """Time two sides against each other.

    Attributes:
        versus: ``baseline`` (optimized against baseline), ``self`` (a side against itself), or
            ``old`` (a side against its version at a commit).
        side: for ``old``, the role of that side.
        past: for ``old``, the page at the commit.
        budget: keyword arguments for `schedule.Budget`.
        replicate: number of this process among the processes that measure the case.
        keep: True to keep the expected results for the next task even if `replicate` is above 0.
        planted: artificial slowdown of the second side, as the share of extra, uncounted calls.
        audit: True to profile the kernels of both sides after the last timing window.
        timer: ``target`` (module:function) and ``options`` of a timer that replaces the plugin's.
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
        other: True for the second of two environments. Only a simulated timer uses this field.
        lap: number of the lap, from 0. Lap 0 first builds the copies once to choose the clock.
        known: the clock and each copy's number of calls in a window, if they were chosen before.
        planted: artificial slowdown of both copies, as the share of extra, uncounted calls.
    """

    side: str
    other: bool = False
    lap: int = 0
    known: tuple[str, list[int]] | None = None
    planted: float = 0.0
    budget: Mapping[str, Json] = {}
    replicate: int = 0
    timer: Mapping[str, Json] | None = None


class WindowTask(CaseTask, frozen=True, kw_only=True, tag="window"):
    """Time a window of copy 0 or 1 of the held side. With `refresh`, write new values first.

    `refresh` is ``last`` before the last block: some of the values are drawn only then.
    """

    copy: int
    refresh: Literal["", "values", "last"] = ""


class ReleaseTask(CaseTask, frozen=True, kw_only=True, tag="release"):
    """Compare the outputs of the held side's last calls with the reference. Then release the side.

    The process frees its GPU memory only after the `last` lap.
    """

    last: bool = True


class CountTask(CaseTask, frozen=True, kw_only=True, tag="count"):
    """Measure a metric of `metric_limits.METRICS`. If `side` is given, measure only that side."""

    metric: str
    side: str = ""
    budget: Mapping[str, Json] = {}
    timer: Mapping[str, Json] | None = None


class ChangedTask(CaseTask, frozen=True, kw_only=True, tag="changed"):
    """Find the sides whose sources differ between the page and `past`, the page at a commit.

    If `arch` is given, also compare the machine code for that arch, or return digests of the
    machine code if there is no `past`. If the role `sass` is given, only return the difference of
    that side's SASS. `opened` are files that the page opens even if its code does not name them.
    """

    past: PageSource | None
    opened: tuple[str, ...] = ()
    arch: str = ""
    sass: str = ""


class SampleTask(CaseTask, frozen=True, kw_only=True, tag="sample"):
    """Time the process side `side` in this process. If `past` is given, use the old page's side."""

    side: str
    past: PageSource | None = None


class CompileTask(CaseTask, frozen=True, kw_only=True, tag="compile"):
    """Assemble every kernel of the case for each of `archs`."""

    archs: tuple[str, ...]


class ProfileTask(CaseTask, frozen=True, kw_only=True, tag="profile"):
    """Profile both sides with torch into `folder`. If `side` is given, only run that side."""

    folder: str = ""
    side: str = ""


class FactsTask(CaseTask, frozen=True, kw_only=True, tag="facts"):
    """Report library versions and the device that are in use in this process."""


class DrawTask(CaseTask, frozen=True, kw_only=True, tag="draw"):
    """Write a sandboxed side's inputs, or `count` new sets of inputs, to the file `values`."""

    values: str
    count: int = 0


class PrepareTask(CaseTask, frozen=True, kw_only=True, tag="prepare"):
    """Prepare the side with the role `side` in the sandbox, with `slots` sets of inputs.

    On the ``graph`` clock, a unit of work is one CUDA graph of `counted` calls. On all other
    clocks, a unit is one call.
    """

    side: str
    clock: str
    counted: int
    slots: int


class PerformTask(CaseTask, frozen=True, kw_only=True, tag="perform"):
    """Run `units` units of work of `side` in the sandbox."""

    side: str
    units: int


class ShowTask(CaseTask, frozen=True, kw_only=True, tag="show"):
    """Run the side in the sandbox on the file `values`. Write outputs of `slots` to `outputs`."""

    side: str
    values: str
    outputs: str
    slots: tuple[int, ...]


class CompareTask(CaseTask, frozen=True, kw_only=True, tag="compare"):
    """Compare the outputs in the file `outputs` with the reference after `steps` calls."""

    side: str
    outputs: str
    steps: int


class PeaksTask(Task, frozen=True, kw_only=True, tag="peaks"):
    """Measure the machine's peak rates, or each level of its memory hierarchy (`hierarchy`)."""

    hierarchy: bool = False


class CollectivesTask(Task, frozen=True, kw_only=True, tag="collectives"):
    """Time the collective operations `ops` at the message sizes `sizes`, in bytes."""

    ops: tuple[str, ...]
    sizes: tuple[int, ...]


class DiagnoseTask(CaseTask, frozen=True, kw_only=True, tag="diagnose"):
    """Record when each rank reaches each collective: of both sides, or of a loop of all-reduces."""


class StopTask(Task, frozen=True, kw_only=True, tag="stop"):
    """End the process."""


def case_fields(task: CaseTask) -> dict[str, Json]:
    """Return the fields that are the same in every task about the case."""
    return {name: getattr(task, name) for name in CaseTask.__struct_fields__}


class ProgressUpdate(Struct, frozen=True, tag="progress"):
    """A message about the current work of the process, which also restarts the time limit."""

    text: str


class RankStarted(Struct, frozen=True, tag="rank started"):
    """The first message of a rank: its number and its process id."""

    rank: int
    pid: int


class RankStep(Struct, frozen=True, tag="rank step"):
    """The number of synchronization steps that a rank has completed with the other ranks."""

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
"""The kinds of errors. ``wrong``: a result is wrong. ``page``: the page breaks a rule. ``side``: a
side raised an exception. ``fault``: a side raised an exception, and its process can no longer use
its GPU. ``disturbed``: the machine disturbed the measurement. ``traced``: a debugger or a profiler
runs in the process. ``unrecorded``: a replayed run has no more samples."""


class Reply(Struct, frozen=True, kw_only=True, tag="reply"):
    """The answer to a task: a result, or an error.

    Attributes:
        error, message: the kind of error, or None, and its text. The last line is the remedy.
        at, trace: the size, if it is not the task's own, and the page's lines of the traceback.
        result: an object of `task_results`, or plain JSON types after a pipe (see `read`).
        exhausted: True if the process uses more GPU memory than its share and must be replaced.
        code: the exception's `code` attribute, a short word for the reason, for `aisp judge`.
    """

    error: ErrorKind | None = None
    message: str = ""
    at: str = ""
    trace: str = ""
    result: Json = {}
    exhausted: bool = False
    code: str = ""

    def read(self, kind: type[Result]) -> Result:
        """Return the result as an instance of `kind`."""
        return convert(self.result, kind, strict=False)  # infinities are sent as text


Answer: TypeAlias = ProgressUpdate | RankStarted | RankStep | Reply
"""Any message from a worker process."""


def failed(error: ErrorKind, message: str, doing: str, trace: str) -> Reply:
    """Return the reply for a failure whose last progress message was `doing`."""
    work, _, size = doing.partition(AT)
    return Reply(error=error, message=f"{message} during: {work}", at=size, trace=trace)


def timeout_reply(seconds: float, doing: str, trace: str) -> Reply:
    """Return the reply for a task that was not answered within `seconds`."""
    reply = failed("timeout", f"no answer within {seconds:g} s", doing, trace)
    return replace(reply, message=f"{reply.message}\n{TIMEOUT_HINT}")
