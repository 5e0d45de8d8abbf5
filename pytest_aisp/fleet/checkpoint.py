"""The file with the finished cases of a fleet run. ``aisp fleet resume`` continues from it."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER, FILE = "aisp-fleet", "run.pickle"
"""The name of the folder in pytest's cache, and the name of the file in this folder."""
Reports = list[dict[str, Any]]
"""The reports of a case: setup, call and teardown, as pytest serializes them."""


@dataclass
class Checkpoint:
    """The state of a run that was interrupted.

    Attributes:
        arguments, folder: the command line of pytest, and the folder in which it ran.
        code: the hash of the code that ran.
        reports: by node id, the reports of finished cases that are not waiting for a canary.
        canaries: the canary results of the seats, as plain values.
    """

    arguments: list[str]
    folder: str
    code: str
    reports: dict[str, Reports] = field(default_factory=dict)
    canaries: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> Checkpoint:
        """Return the run in `file`. An incomplete last record is ignored.

        Raises:
            FileNotFoundError: if the file does not exist.
        """
        waiting: dict[str, Reports] = {}
        with open(file, "rb") as stream:
            checkpoint = cls(**pickle.load(stream))
            with contextlib.suppress(EOFError, pickle.UnpicklingError):
                while True:
                    kind, *rest = pickle.load(stream)
                    if kind == "case":
                        key, reports, unproved = rest
                        (waiting if unproved else checkpoint.reports)[key] = reports
                    elif kind == "proved":
                        keys, canary = rest
                        checkpoint.reports |= {key: waiting[key] for key in keys if key in waiting}
                        checkpoint.canaries += [canary] if canary else []
        return checkpoint


class CheckpointFile:
    """Appends records to the file. After a failed write, no more records are written."""

    def __init__(self, file: Path, run: Checkpoint) -> None:
        self._file: Path | None = file
        head = {"arguments": run.arguments, "folder": run.folder, "code": run.code}
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        self._append(head)

    def case(self, key: str, reports: Reports, *, unproved: bool) -> None:
        """Add a finished case. If `unproved`, it counts only after `proved`."""
        self._append(("case", key, reports, unproved))

    def proved(self, keys: Sequence[str], canary: dict[str, Any] | None) -> None:
        """Add a seat's canary result, which confirms the verdicts of `keys`."""
        self._append(("proved", list(keys), canary))

    def _append(self, record: object) -> None:
        if self._file is None:
            return
        try:
            with open(self._file, "ab") as stream:
                stream.write(pickle.dumps(record))
                stream.flush()
                os.fsync(stream.fileno())
        except OSError:
            self._file = None

    def remove(self) -> None:
        """Remove the file of a complete run."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
