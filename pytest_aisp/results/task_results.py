"""The result of each task, as the worker builds it and the client reads it."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import UNSET, Struct, UnsetType

from .messages import Json

Amounts: TypeAlias = dict[str, int | float]
"""Amounts by side or by metric. A whole number stays one. The result of a `CountTask`."""


class SizeCheck(Struct):
    """The findings of a check at one size.

    Attributes:
        errors: by side, the largest rms and the worst element in allowed deviations.
        controls: the result of each control.
        exact: whether the exact integer probe ran, or why not.
    """

    errors: dict[str, list[float]] = {}
    controls: list[str] = []
    exact: str = ""


class CheckResult(Struct):
    """The result of a `CheckTask`: findings by size, hashes of sources, seconds by phase."""

    sizes: dict[str, SizeCheck]
    sources: dict[str, str]
    spent: dict[str, float] = {}


class TimeResult(Struct, kw_only=True):
    """The result of a `TimeTask`. The first fields are those of `schedule.Samples`.

    Attributes:
        value, error: ln(speedup), and its standard error.
        sources: hashes of both sides' sources.
        work: what a call must move and compute.
        spent: seconds by phase.
        one_off: by side, seconds to prepare it.
        errors: by side, the largest error of the outputs of timed calls.
        outputs_checked: how many outputs of timed calls were compared.
        kernels: by side, fields of `cross_check.KernelProfile`.
        assembled: what each kernel uses on this arch.
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
    outputs_checked: int | UnsetType = UNSET
    kernels: dict[str, dict[str, Json]] | UnsetType = UNSET
    assembled: list[dict[str, Json]] | UnsetType = UNSET


class ChangedResult(Struct):
    """The result of a `ChangedTask`: which sides changed, or why they cannot be compared."""

    baseline: bool = False
    optimized: bool = False
    why: str = ""


class SampleResult(Struct):
    """The result of a `SampleTask`."""

    seconds: float


class CompileResult(Struct):
    """The result of a `CompileTask`: what each kernel uses, the same in words, and sources."""

    assembled: list[dict[str, Json]]
    words: list[str]
    sources: dict[str, str]


class ProfileResult(Struct, omit_defaults=True):
    """The result of a `ProfileTask`.

    Attributes:
        files: names of what was written, by side and of ``both``.
        differences, words: how the sides differ, as data and as text.
        memory: bytes by side, before and after a call, and by kind.
    """

    files: dict[str, list[str]] = {}
    differences: dict[str, Json] = {}
    words: str = ""
    memory: dict[str, dict[str, Amounts]] = {}


class PrepareResult(Struct):
    """The result of a `PrepareTask`: the calls in a unit of work."""

    unit: int


class PeaksResult(Struct):
    """The result of a `PeaksTask`: rates by name, and facts about them."""

    rates: dict[str, float]
    facts: dict[str, str]


Facts: TypeAlias = dict[str, Json]
"""Versions, and the device. The result of a `FactsTask`. A recorded one has all facts."""
