"""A run as the report reads it: `results.json` of an artifacts folder, and the samples beside it.

This is the one place that knows where things lie in there. Whatever a partial run lacks is absent,
and said; what is no run at all is refused.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..common.answers import Unanswerable
from ..results import runs, samples
from ..results.artifacts import WRITTEN
from ..results.published import SCHEMA
from ..results.samples import SamplesError

NAMED = ("path", "sha256")
"""What a case says of its file of samples."""


@dataclass(frozen=True)
class Run:
    """One run's results.

    Attributes:
        results: what `results.json` holds, plain types, finite numbers, text that can be written.
        folder: where its samples and profiles lie; None for results alone.
        killed: the journal of a run that did not live to write `results.json`; else None.
    """

    results: Mapping[str, Any]
    folder: Path | None = None
    killed: runs.Run | None = None

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Return the run in `folder`.

        Raises:
            Unanswerable: where there is none that can be read.
        """
        folder = runs.folder_of(folder)
        path = folder / WRITTEN[0] if folder.is_dir() else folder
        if not path.exists():  # a killed run has its journal alone
            try:
                loaded = runs.load(folder)
            except runs.RunError as error:
                raise Unanswerable(str(error)) from None
            return replace(cls.of(loaded.plain(), loaded.path), killed=loaded)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _no_run(path, str(error)) from None
        if not isinstance(found, dict) or not isinstance(found.get("cases"), list):
            raise _no_run(path, "it lists no cases")
        if found.get("schema") != SCHEMA:
            why = f"its schema is {found.get('schema')!r}, understood is {SCHEMA}"
            raise _no_run(path, why)
        return cls.of(found, path.parent)

    @classmethod
    def of(cls, results: Mapping[str, Any], folder: Path | None = None) -> Run:
        """Return the run whose `results.json` holds `results`."""
        return cls(clean(results), folder)

    @property
    def manifest(self) -> Mapping[str, Any]:
        """What ran, on what."""
        run = self.results.get("run")
        return run if isinstance(run, Mapping) else {}

    @property
    def cases(self) -> list[Mapping[str, Any]]:
        """The cases in the order in which they finished; what has no id is none."""
        cases = self.results.get("cases", [])
        return [c for c in cases if isinstance(c, Mapping) and isinstance(c.get("id"), str)]

    @property
    def peaks(self) -> Mapping[str, Any]:
        """The machine's measured rates, by product."""
        peaks = self.manifest.get("peaks")
        return peaks if isinstance(peaks, Mapping) else {}

    @property
    def started(self) -> str:
        """When, UTC, in ISO 8601; empty where nobody wrote it down."""
        return str(self.manifest.get("started") or "")

    def timings(self, case: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return what each process measured of `case`, in order; nothing where nobody timed it.

        Raises:
            SamplesError: where its file is missing, is not the one that the run has written, or
                holds no samples. A report is handed around: no path in it says whose folder it is.
        """
        told = case.get("samples")
        if told is None:
            if case.get("speedup"):
                raise SamplesError(samples.UNWRITTEN)
            return []
        if self.folder is None:
            raise SamplesError("its samples are not here, the results alone are")
        if not isinstance(told, Mapping) or not all(isinstance(told.get(k), str) for k in NAMED):
            raise SamplesError("the run does not say in which file its samples are")
        try:
            found = clean(samples.read(self.folder, told)).get("timings")
        except SamplesError as error:
            raise SamplesError(str(error).replace(f"{self.folder}{os.sep}", "")) from None
        except (TypeError, ValueError):
            found = None
        if not isinstance(found, list):
            raise SamplesError(f"{told['path']}: holds no samples")
        return [t for t in found if isinstance(t, Mapping)]


def clean(value: Any) -> Any:
    """Return `value` with None for numbers that JSON lacks, and no half of a character in text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {clean(str(k)): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v) for v in value]
    return value


def _no_run(path: Path, why: str) -> Unanswerable:
    return Unanswerable(
        f"{path}: not the results of a run ({why})\n"
        "Give the folder that a run wrote:\n"
        "    pytest --aisp-artifacts=DIR <paths>"
    )
