"""Read `results.json` in an artifacts folder for the report.

The run may be incomplete or written by another version, so missing and malformed fields are
accepted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as field_of
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, TypeVar, get_args, get_origin

import msgspec
from msgspec import Struct, ValidationError, field

from ..results import run_reader
from ..results.artifacts import WRITTEN
from ..results.messages import Json
from ..results.results_json import SCHEMA, Case, Manifest, Speedup
from ..results.task_results import HierarchyResult
from ..util.cli_result import CliError
from ..worker.ncu_counters import Counters
from ..worker.timeline import Timeline

Model = TypeVar("Model", bound=Struct)
fields_of = cache(msgspec.structs.fields)

VERDICTS: tuple[str, ...] = ("wrong", "invalid", "regressed", "fail", "disturbed")
VERDICTS += ("inconclusive", "stale", "new", "improved", "pass", "checked", "compiled", "")
"""All verdicts, the worst first. A case without a verdict has an empty string."""
MAX_TEXT, MAX_LINES = 4_000, 40
"""The maximum characters and lines of a case's text. Longer texts are cut."""
EMPTY: tuple[Json, ...] = (None, "", [], {}, 0, 1, True)
"""Values for a missing required field. The first value of the right type is used."""


class Process(Struct):
    """The windows of one process that the report draws.

    Attributes:
        sides: one letter per window in the order of measurement: ``b`` (baseline) or ``o``
            (optimized).
        us: the time of each window, in microseconds.
        blocks: the number of measured blocks.
        shown: the indices of the drawn blocks, or None if all blocks are drawn.
        laps: the indices of the blocks before which the inputs and CUDA graphs were built again.
        dropped: the reason and the position of each block that was measured again.
        of: the number of processes that measured the case.
    """

    sides: str
    us: list[float]
    blocks: int
    shown: list[int] | None
    laps: list[int]
    dropped: list[tuple[str, int | None]]
    facts: dict[str, Json]
    of: int


class HistoryEntry(Struct):
    """The result of a case in one run.

    Attributes:
        current: True for the run that the report is about.
        change: the change of the result in this run, in the words of `aisp results history`, or an
            empty string.
    """

    started: str
    commit: str
    speedup: Speedup
    verdict: str
    current: bool
    change: str = ""


class ReportCase(Case, kw_only=True):
    """A case of a run, with all data that its page in the report shows."""

    samples: Json = None  # `data.read_timings` checks this field
    processes: list[Process] = field(default_factory=list)
    samples_error: str = ""
    history: list[HistoryEntry] = field(default_factory=list)
    command: str = ""
    diff: str = ""
    code_left_out: bool = False
    timeline: Timeline | None = None
    counters: dict[str, Counters] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.verdict = self.verdict if self.verdict in VERDICTS else ""
        self.chapter = self.chapter or PurePosixPath(self.page).parent.name
        self.reasons = [shortened(line) for line in self.reasons[:MAX_LINES]]
        self.notes = [shortened(line) for line in self.notes[:MAX_LINES]]
        self.remarks = [shortened(line) for line in self.remarks[:MAX_LINES]]
        if self.speedup and min(self.speedup.value, self.speedup.low, self.speedup.high) <= 0:
            self.speedup = None
        if self.seconds and min(self.seconds.baseline, self.seconds.optimized) <= 0:
            self.seconds = None
        if self.stored and self.stored.speedup <= 0:
            self.stored = None

    @property
    def claimed_speedup(self) -> float | None:
        """The claimed speedup: 1 for ``neutral``, and None for ``yardstick``."""
        claim = self.claim.at_least if self.claim else None
        if isinstance(claim, str):
            return 1.0 if claim == "neutral" else None
        return claim or None


@dataclass(frozen=True)
class ReportRun:
    """The results of one run.

    Attributes:
        cases: the cases in the order in which they finished.
        lost: a message for each line of the journal that could not be read.
        folder: the folder of the samples and profiles, or None if there is only `results.json`.
        hierarchy: the measured memory hierarchy of the machine, or None.
        past: the entries of a history, by the case's id and product.
        killed: the journal, if the run was killed before it wrote `results.json`, or None.
    """

    manifest: Manifest
    cases: list[ReportCase]
    lost: list[str]
    folder: Path | None = None
    killed: run_reader.RecordedRun | None = None
    hierarchy: HierarchyResult | None = None
    past: Mapping[tuple[str, str], Sequence[HistoryEntry]] = field_of(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> ReportRun:
        """Return the run in `folder`.

        Raises:
            CliError: if the folder contains no run that can be read.
        """
        folder = run_reader.folder_of(folder)
        path = folder / WRITTEN[0] if folder.is_dir() else folder
        if not path.exists():  # a run that was killed wrote only its journal
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
        schema = results.get("schema")
        try:
            run_reader.refuse_newer(path, schema)
        except run_reader.RunError as error:
            raise CliError(str(error)) from None
        if schema != SCHEMA:
            raise _not_a_run(path, f"its schema is {schema!r}, this version reads {SCHEMA}")
        return cls.of(results, path.parent)

    @classmethod
    def of(cls, results: Mapping[str, Json], folder: Path | None = None) -> ReportRun:
        """Return the run with the content of its `results.json`. Skip cases without an id."""
        plain = cleaned(results)
        cases = [c for c in plain["cases"] if isinstance(c, dict) and isinstance(c.get("id"), str)]
        return cls(
            manifest=lenient(Manifest, plain.get("run")),
            cases=[lenient(ReportCase, case) for case in cases],
            lost=[str(line) for line in plain.get("lost") or ()],
            folder=folder,
        )


def read_hierarchy(path: Path) -> HierarchyResult:
    """Return the memory hierarchy that ``aisp machine peak --hierarchy --json`` has written.

    Raises:
        CliError: if the file cannot be read, or contains something else.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=HierarchyResult)
        reason = "" if found.levels else "it lists no levels"
        if any(min(level.bandwidth, level.latency) <= 0 for level in found.levels):
            reason = "a level has no bandwidth or no latency"
    except (OSError, msgspec.DecodeError) as error:
        reason = str(error)
    if reason:
        raise CliError(
            f"{path}: not a memory hierarchy ({reason})\n"
            "Measure it:\n"
            f"    aisp machine peak --hierarchy --json > {path}"
        )
    return found


def lenient(model: type[Model], plain: Json) -> Model:
    """Return `plain` as a model. Missing or malformed fields get a default or empty value."""
    try:
        return msgspec.convert(plain, model)
    except ValidationError:
        table = plain if isinstance(plain, dict) else {}
    values: dict[str, object] = {}
    for each in fields_of(model):
        value = table.get(each.encode_name)
        kind = get_args(each.type)[0] if get_origin(each.type) is Annotated else each.type
        items = get_args(kind)[1] if get_origin(kind) is dict else object
        if _is_struct(kind):
            values[each.name] = lenient(kind, value)
        elif _is_struct(items) and isinstance(value, dict):
            values[each.name] = {key: lenient(items, item) for key, item in value.items()}
        else:
            for candidate in (value, *EMPTY) if each.required else (value,):
                try:
                    values[each.name] = msgspec.convert(candidate, each.type)
                    break
                except ValidationError:
                    continue
    return model(**values)


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct)


def cleaned(value: Json) -> Json:
    """Return `value` with None in place of NaN and infinity, and without lone surrogates."""
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
