"""The results of the tasks, which the worker process builds and the client reads."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import UNSET, Struct, UnsetType

from .messages import Json

Amounts: TypeAlias = dict[str, int | float]
"""Amounts by side or by metric, such as the result of a `CountTask`. Integers stay integers."""


class SizeCheck(Struct):
    """The findings of a check at one size.

    Attributes:
        errors: each side's largest rms error and largest error of an element, both as multiples of
            the allowed standard deviation.
        controls: the result of each negative control.
        exact: the result of the exact integer probe, or the reason why it did not run.
        remarks: remarks about the error bound.
        inputs: remarks about suspicious inputs.
    """

    errors: dict[str, list[float]] = {}
    controls: list[str] = []
    exact: str = ""
    remarks: list[str] = []
    inputs: list[str] = []


class CheckResult(Struct):
    """The result of a `CheckTask`.

    Attributes:
        sizes: the findings at each size that the page lists.
        sources: hashes of both sides' sources.
        searched: the further sizes that a search tried.
        spent: seconds spent in each phase.
        opened: the files under the root that the page opened or imported and whose names are not
            in its code, as paths relative to the root.
        lent: further such files, which functions of the page's modules opened for any page.
    """

    sizes: dict[str, SizeCheck]
    sources: dict[str, str]
    searched: list[str] = []
    spent: dict[str, float] = {}
    opened: list[str] = []
    lent: list[str] = []


class TimeResult(Struct, kw_only=True):
    """The result of a `TimeTask`. The first fields are the fields of `schedule.Samples`.

    Attributes:
        value, error: ln(speedup), and its standard error.
        sources: hashes of both sides' sources.
        work: the minimum bytes and operations of a call.
        spent: seconds spent in each phase.
        one_off: the seconds to prepare each side once.
        errors: the largest error of each side's outputs in timed calls.
        relative: the largest rms error of each side's outputs in timed calls, as a share of the rms
            of the expected values.
        outputs_checked: the number of compared outputs of timed calls.
        kernels: the fields of `cross_check.KernelProfile` for each side.
        assembled: the resources that each kernel uses on this arch, such as registers.
    """

    clock: str
    blocks: list[float] = []
    baseline: list[float]
    optimized: list[float]
    orders: list[str] = []
    dropped: list[str] = []
    details: dict[str, Json] = {}
    laps: list[float] = []
    firsts: list[int] = []
    dropped_at: list[int] = []
    value: float
    error: float = 0.0
    sources: dict[str, str] = {}
    work: dict[str, int | float | Amounts] = {}
    spent: dict[str, float] = {}
    one_off: dict[str, float] | UnsetType = UNSET
    errors: dict[str, Json] | UnsetType = UNSET
    relative: dict[str, float] = {}
    outputs_checked: int | UnsetType = UNSET
    kernels: dict[str, dict[str, Json]] | UnsetType = UNSET
    assembled: list[dict[str, Json]] | UnsetType = UNSET


class HoldResult(Struct):
    """The result of a `HoldTask`.

    Attributes:
        laps: the number of laps in which the held side is timed.
        counted: the number of calls that the time of each copy's window is divided by.
        repeats: a window's duration divided by the duration of its calls.
    """

    clock: str
    laps: int
    counted: list[int]
    repeats: int


class WindowResult(Struct):
    """The result of a `WindowTask`.

    Attributes:
        seconds: seconds per call.
        disturbed: the cause that disturbed the window, or empty.
        by_machine: False if the side itself disturbed the window.
    """

    seconds: float
    disturbed: str = ""
    by_machine: bool = True


class ChangedResult(Struct):
    """The result of a `ChangedTask`: the changed sides, or the reason why sides cannot be compared.

    Attributes:
        kernels_alone: the roles of changed sides in which only the sources of kernels differ.
        why_timed: the reason why each of these sides must be timed, or empty if the side launches
            the same machine code as before.
        machine_code: the digest of the machine code that each side launches, by role.
        sass: the lines of the diff of a side's SASS.
    """

    baseline: bool = False
    optimized: bool = False
    why: str = ""
    kernels_alone: list[str] = []
    why_timed: dict[str, str] = {}
    machine_code: dict[str, str] = {}
    sass: list[str] = []

    def roles(self) -> list[str]:
        """Return the changed sides' roles, the baseline's first."""
        return [role for role in ("baseline", "optimized") if getattr(self, role)]


class SampleResult(Struct):
    """The result of a `SampleTask`.

    Attributes:
        seconds: seconds per call.
        disturbed: the cause that disturbed the process, or empty.
        cpu_share: CPU time of the process over wall time, in the timed calls.
    """

    seconds: float
    disturbed: str = ""
    cpu_share: float = 0.0


class CompileResult(Struct):
    """The result of a `CompileTask`: each kernel's resources as data and as text, and sources."""

    assembled: list[dict[str, Json]]
    words: list[str]
    sources: dict[str, str]


class ProfileResult(Struct, omit_defaults=True):
    """The result of a `ProfileTask`.

    Attributes:
        files: names of the written files, keyed by side, or by ``both`` for files about both.
        differences, words: the differences between the sides, as data and as text.
        memory: the bytes of each kind of memory ``before`` and ``after`` a call, by side.
    """

    files: dict[str, list[str]] = {}
    differences: dict[str, Json] = {}
    words: str = ""
    memory: dict[str, dict[str, Amounts]] = {}


class PrepareResult(Struct):
    """The result of a `PrepareTask`: the number of calls in a unit of work."""

    unit: int


class PeaksResult(Struct):
    """The result of a `PeaksTask`: the peak rates by name, and facts about the measurement."""

    rates: dict[str, float]
    facts: dict[str, str]


class Level(Struct):
    """One level of the memory hierarchy.

    Attributes:
        working_set: bytes that are read repeatedly, or 0 if the level has a fixed size.
        bandwidth: bytes per second of all SMs.
        latency: seconds of one load in a chain of loads.
    """

    name: str
    working_set: int
    bandwidth: float
    latency: float


class HierarchyResult(Struct):
    """The result of a `PeaksTask` about the memory hierarchy.

    Attributes:
        near, far: clock cycles of a load from the L2, for the fastest and the slowest lines.
    """

    levels: list[Level]
    near: float
    far: float


Facts: TypeAlias = dict[str, Json]
"""The result of a `FactsTask`: versions and the device. A recorded result has all facts."""
