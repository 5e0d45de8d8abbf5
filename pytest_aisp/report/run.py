"""A run as the report reads it: `results.json` of an artifacts folder, and the samples beside it.

A run may be incomplete, or written by another version: a field that is missing or malformed is left
out. The models name everything that a report may show of a run, which may hold secrets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct, ValidationError, field

from ..results import run_reader
from ..results.artifacts import WRITTEN
from ..results.messages import Json
from ..results.results_json import SCHEMA
from ..util.cli_result import CliError

Positive = Annotated[float, Meta(gt=0)]
Model = TypeVar("Model", bound=Struct)

VERDICTS: tuple[str, ...] = ("wrong", "invalid", "regressed", "fail", "inconclusive", "stale")
VERDICTS += ("new", "improved", "pass", "checked", "compiled", "")
"""The worst first. The verdict of a case that was not judged is empty."""
MAX_TEXT, MAX_LINES = 4_000, 40
"""Longer texts of a case, and more lines of them, are cut."""


class Speedup(Struct):
    value: Positive
    low: Positive
    high: Positive


class Seconds(Struct):
    baseline: Positive
    optimized: Positive


class Limit(Struct):
    name: str
    share: float


class Claim(Struct):
    at_least: float | str
    origin: str = field(name="from", default="")

    @property
    def speedup(self) -> float | None:
        """1 for ``neutral``, None for ``yardstick``, which claims nothing."""
        if isinstance(self.at_least, str):
            return 1.0 if self.at_least == "neutral" else None
        return self.at_least if self.at_least > 0 else None


class Stored(Struct):
    speedup: Positive
    origin: str = field(name="from", default="")


class Work(Struct):
    read: float = 0
    write: float = 0
    flops: dict[str, float] = {}
    wire: float = 0


class Metric(Struct, omit_defaults=True):
    baseline: float
    optimized: float
    limit: float | None = None


class Profile(Struct):
    tool: str = ""
    files: list[str] = []


class Case(Struct, kw_only=True, omit_defaults=True):
    """A case of `results.json`. `samples` is `{"path": ..., "sha256": ...}` or None."""

    id: str
    page: str
    chapter: str
    function: str
    baseline: str
    variant: str
    product: str
    arch: str
    bound: str
    clock: str
    verdict: str
    not_timed: str
    size: dict[str, str | float | bool] = {}
    gpus: int = 1
    speedup: Speedup | None = None
    seconds: Seconds | None = None
    limit: Limit | None = None
    work: Work | None = None
    claim: Claim | None = None
    stored: Stored | None = None
    spread: float | None = None
    detectable: float | None = None
    wall: float | None = None
    votes: list[float] = []
    goals: dict[str, Metric] = {}
    reasons: list[str] = []
    notes: list[str] = []
    remarks: list[str] = []
    profile: Profile | None = None
    samples: Json = None

    def __post_init__(self) -> None:
        self.verdict = self.verdict if self.verdict in VERDICTS else ""
        self.chapter = self.chapter or PurePosixPath(self.page).parent.name
        self.reasons = [shortened(line) for line in self.reasons[:MAX_LINES]]
        self.notes = [shortened(line) for line in self.notes[:MAX_LINES]]
        self.remarks = [shortened(line) for line in self.remarks[:MAX_LINES]]


class PeakFacts(Struct, frozen=True):
    date: str | None = None


class Peaks(Struct):
    rates: dict[str, Positive] = {}
    origin: str = field(name="from", default="")
    facts: PeakFacts = PeakFacts()


class Machine(Struct, frozen=True):
    name: str = ""
    product: str = ""
    gpus: list[str] = []
    versions: dict[str, str | None] = {}
    facts: dict[str, Json] = {}
    clocks: dict[str, int | float | None] = {}


class Git(Struct, frozen=True):
    commit: str = ""
    branch: str = ""
    dirty: bool = False


class Manifest(Struct):
    """The facts of a run: when, on which machine, and what went wrong."""

    started: str = ""
    root: str = "."
    mode: str = ""
    complete: bool = True
    invalid: list[str] = []
    not_written: list[str] = []
    no_verdict: list[str] = []
    no_canary: list[str] = []
    machine: Machine = Machine()
    git: Git = Git()
    packages: dict[str, str | None] = {}
    peaks: dict[str, Peaks] = {}


@dataclass(frozen=True)
class ReportRun:
    """One run's results.

    Attributes:
        cases: in the order in which they finished.
        lost: lines of the journal that could not be read.
        folder: where its samples and profiles lie, None if there is only `results.json`.
        killed: the journal of a run that was killed before it wrote `results.json`, else None.
    """

    manifest: Manifest
    cases: list[Case]
    lost: list[str]
    folder: Path | None = None
    killed: run_reader.RecordedRun | None = None

    @classmethod
    def read(cls, folder: Path) -> ReportRun:
        """Return the run in `folder`.

        Raises:
            CliError: if no run can be read there.
        """
        folder = run_reader.folder_of(folder)
        path = folder / WRITTEN[0] if folder.is_dir() else folder
        if not path.exists():  # a killed run has only its journal
            try:
                journal = run_reader.load(folder)
            except run_reader.RunError as error:
                raise CliError(str(error)) from None
            return replace(cls.of(journal.plain(), journal.path), killed=journal)
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _not_a_run(path, str(error)) from None
        if not isinstance(results, dict) or not isinstance(results.get("cases"), list):
            raise _not_a_run(path, "it lists no cases")
        if (schema := results.get("schema")) != SCHEMA:
            raise _not_a_run(path, f"its schema is {schema!r}, this version reads {SCHEMA}")
        return cls.of(results, path.parent)

    @classmethod
    def of(cls, results: Mapping[str, Json], folder: Path | None = None) -> ReportRun:
        """Return the run whose `results.json` holds `results`. Cases without an id are left out."""
        plain = cleaned(results)
        cases = [c for c in plain["cases"] if isinstance(c, dict) and isinstance(c.get("id"), str)]
        return cls(
            manifest=lenient(Manifest, plain.get("run")),
            cases=[lenient(Case, case) for case in cases],
            lost=[str(line) for line in plain.get("lost") or ()],
            folder=folder,
        )


def lenient(model: type[Model], plain: Json) -> Model:
    """Return `plain` as a model. Fields that are missing or malformed get their default, or ""."""
    table = plain if isinstance(plain, dict) else {}
    values: dict[str, object] = {}
    for each in msgspec.structs.fields(model):
        value = table.get(each.encode_name)
        if isinstance(each.type, type) and issubclass(each.type, Struct):
            values[each.name] = lenient(each.type, value)
            continue
        try:
            values[each.name] = msgspec.convert(value, each.type)
        except ValidationError:
            if each.required:
                values[each.name] = ""
    return model(**values)


def cleaned(value: Json) -> Json:
    """Return `value` with None for NaN and infinity, and without halves of surrogate pairs."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {cleaned(str(k)): cleaned(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [cleaned(v) for v in value]
    return value


def shortened(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ..."


def _not_a_run(path: Path, reason: str) -> CliError:
    return CliError(
        f"{path}: not the results of a run ({reason})\n"
        "Give the folder that a run wrote:\n"
        "    pytest --aisp-artifacts=DIR <paths>"
    )
