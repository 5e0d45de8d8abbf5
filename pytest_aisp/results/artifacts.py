"""Write the artifacts of a run to its folder, case by case.

`results.jsonl` has one complete line for each finished case. The samples of each case are in a
separate file in the subfolder `samples`. `canaries.jsonl` has the result of each process's canary
(a self-test). `manifest.json` is written at the start, with the run's options and machine, and
again at the end, with the run's outcome added. At the end, the run also writes `results.json` for
other programs, `results.md` for people, and `results.csv` for spreadsheets.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from . import export, run_reader
from .export import path_below
from .messages import Json
from .results_json import SCHEMA, Canary, Manifest, StoredPeaks
from .row import Row, SampleFile

T = TypeVar("T")
WRITTEN = ("results.json", "results.md", "results.csv")
REPORT = "report.html"


class Unclaimable(Exception):
    """A run must not write to a folder. The message says why, and what to do."""


class Artifacts:
    """The folder for a run's artifacts. Artifacts of an earlier run are removed at the first row.

    Attributes:
        folder: the folder.
        path: the file with one line per case.
        canaries: the file with one line per canary.
        begun: True once the artifacts of an earlier run have been removed.

    Raises:
        OSError: if the folder cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path, self.canaries = folder / run_reader.JOURNAL, folder / run_reader.CANARIES
        self._given: dict[Path, int] = {}
        self._lost: dict[Path, list[str]] = {}
        self._manifest: Manifest | None = None
        self._claim: int | None = None
        self.begun = False
        folder.mkdir(parents=True, exist_ok=True)

    def claim(self) -> None:
        """Lock the folder for this run, until `release` or the end of this process.

        Raises:
            Unclaimable: if the folder contains files that no run wrote, or if another run is
                writing to it.
            OSError: if the folder cannot be written.
        """
        if not run_reader.is_ours(self.folder) and any(
            map(self._is_foreign, self.folder.iterdir())
        ):
            raise Unclaimable(
                "it is not empty and contains no run, so it was left as it is\n"
                "Give another folder, or leave the name out to get one named after the time:\n"
                "    pytest --aisp-artifacts"
            )
        self._claim = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise Unclaimable(
                "another run is writing to it\nWait for its end, or give another folder"
            ) from None
        except OSError:
            pass  # some network file systems have no locks

    def _is_foreign(self, path: Path) -> bool:
        """Return False if `path` is an empty journal (`results.jsonl`), else True."""
        return path != self.path or path.stat().st_size > 0

    def release(self) -> None:
        """Unlock the folder."""
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def start(self, manifest: Manifest) -> None:
        """Write the manifest now, or at the first row if an earlier run's artifacts are there.

        Raises:
            OSError: if the manifest cannot be written.
        """
        self._manifest = manifest
        if not run_reader.is_ours(self.folder):
            self._begin()

    def _begin(self) -> None:
        """Remove only the files that an earlier run wrote. Then write the manifest."""
        self.begun = True
        for name in (run_reader.CANARIES, run_reader.MANIFEST, *WRITTEN, REPORT):
            (self.folder / name).unlink(missing_ok=True)
        run_reader.clear(self.folder)
        self.path.write_text("")  # emptied in place, because the lock belongs to this file
        self._write_manifest()

    def _ensure_begun(self) -> None:
        if not self.begun:
            self._try(self.folder / run_reader.MANIFEST, self._begin)

    def add(self, row: Row) -> SampleFile | None:
        """Append a row and return the file of its samples.

        If a write fails, the run continues, and `error` says why the write failed.
        """
        self._ensure_begun()
        number = self._given.get(self.path, 0) + 1
        samples = self._try(
            self.folder / run_reader.FOLDER, lambda: run_reader.write(self.folder, number, row)
        )
        line = row.journal_line(SCHEMA, samples)
        if line.profile:
            folder = path_below(line.profile.folder, str(self.folder))
            line.profile = replace(line.profile, folder=folder)
        self._append(self.path, line.to_json())
        return samples

    def add_canary(self, canary: Canary) -> None:
        """Append a canary. If the write fails, the run continues, and `error` says why."""
        self._ensure_begun()
        self._append(self.canaries, msgspec.to_builtins(canary))

    def finish(
        self,
        facts: Mapping[str, Json],
        peaks: Mapping[str, StoredPeaks],
        report: Callable[[Path], object] | None = None,
    ) -> None:
        """Complete the manifest, and write the results and the report. `error` lists failed writes.

        Args:
            facts: the manifest's fields about the end of the run.
            peaks: the stored peaks of the products that had cases.
            report: a function that takes the folder and writes the report. This function is called
                last.
        """
        self._ensure_begun()
        if self._manifest is not None:
            ended = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            changes = {"complete": True, **facts, "ended": ended}
            changes["peaks"] = {**self._manifest.peaks, **peaks}
            self._manifest = replace(self._manifest, **changes)
        self._try(self.folder / run_reader.MANIFEST, self._write_manifest)
        self._try(self.folder / WRITTEN[0], lambda: publish(run_reader.load(self.folder)))
        if report is not None:
            self._try(self.folder / REPORT, lambda: report(self.folder))

    def _write_manifest(self) -> None:
        if self._manifest is not None:
            text = json.dumps(msgspec.to_builtins(self._manifest), indent=2) + "\n"
            run_reader.replace(self.folder / run_reader.MANIFEST, text.encode())

    def _append(self, path: Path, plain: Json) -> None:
        line = json.dumps(plain).encode() + b"\n"
        self._try(path, lambda: _append(path, line))

    def _try(self, path: Path, write: Callable[[], T]) -> T | None:
        """Return the result of `write`, or None after an error, which is kept for `path`."""
        self._given[path] = self._given.get(path, 0) + 1
        try:
            return write()
        except (OSError, run_reader.RunError) as error:
            self._lost.setdefault(path, []).append(str(error))
            return None

    @property
    def error(self) -> str | None:
        """A message that says what is missing from the files, why, and what to do, or None."""
        if not self._lost:
            return None
        lacking = [self._lacking(path, why) for path, why in self._lost.items()]
        free = f"    Free space in {self.folder}, then run the same command again."
        return "\n".join([*lacking, free])

    def _lacking(self, path: Path, why: Sequence[str]) -> str:
        if path.name in (run_reader.MANIFEST, *WRITTEN, REPORT):
            return f"{path} is not written: {why[0]}"
        return f"{path} lacks {len(why)} of {self._given[path]} results: {why[0]}"


def publish(run: run_reader.RecordedRun) -> list[Path]:
    """Write `results.json`, `results.md` and `results.csv` of a run. Return their paths.

    Raises:
        OSError: if a file cannot be written.
    """
    cases = run.typed_cases()
    results = json.dumps(run.plain(), indent=1) + "\n"
    texts = (results, export.markdown(run.manifest, cases), export.csv_text(cases))
    for name, text in zip(WRITTEN, texts, strict=True):
        run_reader.replace(run.path / name, text.encode("utf-8", "backslashreplace"))
    return [run.path / name for name in WRITTEN]


def stamped(base: Path) -> Path:
    """Make a folder below `base` named after the current time, point `latest` at it, and return it.

    Raises:
        OSError: if the folder cannot be made, or if `latest` is a folder and not a link.
    """
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H%M%SZ")
    latest = base / run_reader.LATEST
    if latest.is_dir() and not latest.is_symlink():
        raise OSError(f"{latest} is a folder; it has to be a link to the newest run, or absent")
    base.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = base / (now if number == 1 else f"{now}-{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            break
        number += 1
    _point(latest, folder.name)
    return folder


def _point(latest: Path, name: str) -> None:
    """Make `latest` a link to `name`, or a file with the name if links are not supported."""
    temporary = latest.with_name(f".{latest.name}-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        os.symlink(name, temporary, target_is_directory=True)
    except (OSError, NotImplementedError):
        temporary.write_text(name + "\n")
    try:
        os.replace(temporary, latest)
    finally:
        temporary.unlink(missing_ok=True)


def _append(path: Path, line: bytes) -> None:
    """Append the whole line or nothing. The next line would be joined to a half-written one."""
    with open(path, "ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[file.write(line) :]
        except BaseException:
            with suppress(OSError):
                file.truncate(end)
            raise
