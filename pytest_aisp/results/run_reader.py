"""Read a run from its folder of artifacts, even if the run was killed."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec
from msgspec import Struct, structs

from . import export
from .messages import Json
from .metric_limits import check_goals
from .results_json import SCHEMA, Canary, Case, Manifest
from .row import JournalLine, Row, SampleFile, Samples

T = TypeVar("T")
JOURNAL, CANARIES, MANIFEST = "results.jsonl", "canaries.jsonl", "manifest.json"
LATEST = "latest"
"""A link to the newest of the timestamped folders, or a file that contains its name."""


class RunError(Exception):
    """The folder has no readable run. The message has the reason and the remedy."""


@dataclass(frozen=True)
class RecordedRun:
    """One run, as read from its folder.

    Attributes:
        path: the folder.
        manifest: the run's options, its machine and its outcome.
        lines: the journal's lines, one per case. Each line refers to a file with the case's
            samples.
        canaries: the canary of each process.
        lost: a message about each skipped line. Half-written lines are skipped.
        plain_manifest, plain_canaries: the contents of the manifest and of the canaries, including
            fields that only newer versions use.
    """

    path: Path
    manifest: Manifest
    lines: tuple[JournalLine, ...]
    canaries: tuple[Canary, ...]
    lost: tuple[str, ...]
    plain_manifest: Mapping[str, Json]
    plain_canaries: Sequence[Mapping[str, Json]]

    @property
    def cases(self) -> list[dict[str, Json]]:
        """The cases of `results.json` as plain types."""
        return [msgspec.to_builtins(case) for case in self.typed_cases()]

    def typed_cases(self) -> list[Case]:
        """Return the cases of `results.json`."""
        return [export.case(line, self.manifest.root) for line in self.lines]

    def plain(self) -> dict[str, Json]:
        """Return the contents of `results.json`."""
        return {
            "schema": SCHEMA,
            "run": self.plain_manifest,
            "cases": self.cases,
            "canaries": self.plain_canaries,
            "lost": list(self.lost),
        }

    def samples(self, case: Mapping[str, Json]) -> Samples:
        """Return the samples of a case: its ``checks``, ``timings`` and ``against``.

        Raises:
            RunError: if the samples are missing, or were changed after the run wrote them.
        """
        file = msgspec.convert(case["samples"], SampleFile | None)
        return self._samples(case["id"], file)

    def rows(self) -> Iterator[Row]:
        """Yield each case's row with its samples. Raises RunError if samples are missing."""
        for line in self.lines:
            yield line.with_samples(self._samples(line.nodeid, line.samples))

    def _samples(self, case: str, file: SampleFile | None) -> Samples:
        try:
            return read(self.path, file)
        except SamplesError as error:
            raise RunError(f"{case}: {error}") from None


def load(folder: Path | str) -> RecordedRun:
    """Return the run in `folder`.

    Raises:
        RunError: if the folder has no run that can be read.
    """
    path = folder_of(Path(folder))
    if not path.is_dir():
        raise RunError(f"{folder}: there is no such folder\n{_MAKE}")
    found = _plain_manifest(path)
    lines, lost = journal(path / JOURNAL)
    canaries, torn = _lines(path / CANARIES) if (path / CANARIES).exists() else ([], [])
    return RecordedRun(
        path=path,
        manifest=_converted(path / MANIFEST, found, Manifest),
        lines=tuple(lines),
        canaries=_converted(path / CANARIES, canaries, tuple[Canary, ...]),
        lost=(*(f"{JOURNAL}: {why}" for why in lost), *(f"{CANARIES}: {why}" for why in torn)),
        plain_manifest=found,
        plain_canaries=canaries,
    )


def folder_of(path: Path) -> Path:
    """Return `path`, or the folder that a link or file named `latest` points to."""
    if path.name != LATEST:
        return path
    if path.is_file():
        return path.parent / path.read_text(encoding="utf-8").strip()
    return path.resolve()  # a later run may change the link, so resolve it now


def journal(file: Path) -> tuple[list[JournalLine], list[str]]:
    """Return the lines of a journal, and messages about skipped lines.

    Raises:
        RunError: if the file cannot be read, is not a journal, or has another schema.
    """
    plain, lost = _lines(file)
    for line in plain:
        _check_fields(file, line, "nodeid", JournalLine)
    lines = _converted(file, plain, list[JournalLine])
    with _reading(file):
        for case in lines:
            check_goals(case.goals)
    return lines, lost


def _lines(file: Path) -> tuple[list[dict[str, Json]], list[str]]:
    """Return the objects of all whole lines, and a message if the last line is half written."""
    with _reading(file):
        *whole, last = file.read_text(encoding="utf-8").split("\n")
        lines = [_object(line) for line in whole]
        try:
            return [*lines, *([_object(last)] if last else [])], []
        except ValueError:
            if not lines and not file.with_name(MANIFEST).exists():
                raise  # this is not a journal whose last line is half written
    case = re.search(r'"nodeid": "((?:[^"\\]|\\.)*)"', last)
    of = f", of {case[1]}," if case else ""
    return lines, [f"its last line{of} is incomplete and was left out"]


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turn errors from reading `file`, or from its contents, into RunErrors."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{file}: cannot be read: {error.strerror}\n{_MAKE}") from None
    except ValueError as error:
        raise RunError(f"{file}: was not written by pytest-aisp: {error}\n{_MAKE}") from None


def _object(line: str) -> dict[str, Json]:
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError(f"one of its lines is not a JSON object: {line[:40]}")
    return found


def manifest(path: Path) -> Manifest:
    """Return the manifest of the run in the folder `path`.

    Raises:
        RunError: if the folder has no manifest of pytest-aisp, or if it has another schema.
    """
    return _converted(path / MANIFEST, _plain_manifest(path), Manifest)


def _plain_manifest(path: Path) -> dict[str, Json]:
    file = path / MANIFEST
    if not file.exists() and (path / JOURNAL).exists():
        journal(path / JOURNAL)  # for a journal of an older version, this raises a clearer message
    if not file.exists():
        raise RunError(f"{path}: holds no run: it has no {MANIFEST}\n{_MAKE}")
    with _reading(file):
        found = _object(file.read_text(encoding="utf-8"))
    _check_fields(file, found, "root", Manifest)
    return found


def _converted(file: Path, plain: Json, model: type[T]) -> T:
    with _reading(file):
        return msgspec.convert(plain, model)


def is_ours(folder: Path) -> bool:
    """Return whether a run of any version wrote the manifest in `folder`."""
    try:
        found = _object((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return {"root", "started"} <= found.keys()


def _check_fields(file: Path, found: Mapping[str, Json], sign: str, model: type[Struct]) -> None:
    """Raise RunError if `found` lacks `sign` or a required field, or has another schema version."""
    if sign not in found:
        raise RunError(f"{file}: was not written by pytest-aisp: it lacks {sign}\n{_MAKE}")
    schema = found.get("schema", 0)
    refuse_newer(file, schema)
    if schema != SCHEMA:
        reads = f"schema {schema}; this one reads {SCHEMA}"
        raise RunError(f"{file}: was written by an older pytest-aisp ({reads})\n{_AGAIN}")
    required = {field.name for field in structs.fields(model) if field.required}
    if missing := sorted(required - found.keys()):
        raise RunError(f"{file}: lacks {', '.join(missing)}\n{_AGAIN}")


def refuse_newer(file: Path, schema: Json) -> None:
    """Raise RunError if a newer version with this schema version wrote `file`."""
    if isinstance(schema, int) and schema > SCHEMA:
        reads = f"schema {schema}; this one reads {SCHEMA}"
        way_out = "    pip install --upgrade pytest-aisp"
        raise RunError(f"{file}: was written by a newer pytest-aisp ({reads})\n{way_out}")


_MAKE = "To make pytest write a run:\n    pytest --aisp-artifacts=DIR"
_AGAIN = "Measure again:\n    pytest --aisp-artifacts=DIR"


FOLDER = "samples"
LONGEST = 100
"""The maximum length of a case id in a file name. File systems allow 255 bytes per name."""
OURS = re.compile(r"\d{4,}-[A-Za-z0-9.=,_-]+\.json")
UNWRITTEN = "its samples could not be written"


class SamplesError(Exception):
    """The samples are missing, or were changed after the run wrote them."""


def name_of(number: int, case: str) -> str:
    """Return a unique file name that has only characters that every file system accepts."""
    safe = re.sub(r"[^A-Za-z0-9.=,_-]", "_", case)[-LONGEST:]
    return f"{number:04d}-{safe}.json"


def write(folder: Path, number: int, row: Row) -> SampleFile:
    """Write the samples of a case. Return the path of the file below `folder`, and its hash.

    Raises:
        OSError: if the samples cannot be written. No partial file remains.
    """
    samples = {"checks": row.checks, "timings": row.timings, "against": row.against}
    data = json.dumps(msgspec.to_builtins(samples)).encode()
    path = PurePosixPath(FOLDER, name_of(number, row.nodeid))
    replace(folder / path, data)
    return SampleFile(str(path), hashlib.sha256(data).hexdigest())


def read(folder: Path, at: SampleFile | None) -> Samples:
    """Return the samples in the file `at`.

    Raises:
        SamplesError: if the samples are missing or malformed, or were changed after the run.
    """
    if at is None:
        raise SamplesError(UNWRITTEN)
    path = folder / at.path
    if not path.resolve().is_relative_to(folder.resolve()):
        raise SamplesError(f"{at.path}: samples lie below their run's folder, in {FOLDER}/")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SamplesError(
            f"{path}: its samples are missing: {error.strerror}\n"
            f"Copy the whole folder of the run, including {FOLDER}/"
        ) from None
    found = hashlib.sha256(data).hexdigest()
    if found != at.sha256:
        raise SamplesError(
            f"{path}: the run wrote other samples: SHA-256"
            f" {found[:12]}..., not {at.sha256[:12]}...\nCopy the folder of the run again"
        )
    try:
        return msgspec.convert(json.loads(data), Samples)
    except ValueError as error:
        raise SamplesError(f"{path}: was not written by pytest-aisp: {error}\n{_AGAIN}") from None


def clear(folder: Path) -> None:
    """Remove the samples of an earlier run."""
    for file in (folder / FOLDER).glob("*.json"):
        if OURS.fullmatch(file.name):
            file.unlink()


def replace(path: Path, data: bytes) -> None:
    """Replace the contents of a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
