"""A run as the report reads it: `results.json` of an artifacts folder, and the samples beside it.

This is the one place that knows where things lie in there. Whatever a partial run lacks is absent,
and said; what is no run at all is refused.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..results import run_reader
from ..results.artifacts import WRITTEN
from ..results.export import SCHEMA
from ..results.run_reader import SamplesError
from ..util.cli_result import CliError

NAMED = ("path", "sha256")
"""What a case says of its file of samples."""


@dataclass(frozen=True)
class ReportRun:
    """One run's results.

    Attributes:
        results: what `results.json` holds, plain types, finite numbers, text that can be written.
        folder: where its samples and profiles lie; None for results alone.
        killed: the journal of a run that did not live to write `results.json`; else None.
    """

    results: Mapping[str, Any]
    folder: Path | None = None
    killed: run_reader.RecordedRun | None = None

    @classmethod
    def read(cls, folder: Path) -> ReportRun:
        """Return the run in `folder`.

        Raises:
            Unanswerable: where there is none that can be read.
        """
        folder = run_reader.folder_of(folder)
        path = folder / WRITTEN[0] if folder.is_dir() else folder
        if not path.exists():  # a killed run has its journal alone
            try:
                loaded = run_reader.load(folder)
            except run_reader.RunError as error:
                raise CliError(str(error)) from None
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
    def of(cls, results: Mapping[str, Any], folder: Path | None = None) -> ReportRun:
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
                raise SamplesError(run_reader.UNWRITTEN)
            return []
        if self.folder is None:
            raise SamplesError("its samples are not here, the results alone are")
        if not isinstance(told, Mapping) or not all(isinstance(told.get(k), str) for k in NAMED):
            raise SamplesError("the run does not say in which file its samples are")
        try:
            found = clean(run_reader.read(self.folder, told)).get("timings")
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


def _no_run(path: Path, why: str) -> CliError:
    return CliError(
        f"{path}: not the results of a run ({why})\n"
        "Give the folder that a run wrote:\n"
        "    pytest --aisp-artifacts=DIR <paths>"
    )


BUDGET, LEAST, MOST = 24_000, 6, 40
"""Blocks of four windows that a whole report holds, and the least and most of one process."""
PROCESSES = 8
"""Processes of a case that are shown, the first ones."""
FACTS: tuple[str, ...] = ("sm_mhz", "watts", "celsius", "as_called", "gpu_only", "peak_bytes")
FACTS += ("graph_nodes",)


def blocks_for(cases: int) -> int:
    """Return how many blocks of each process a report of `cases` cases may hold."""
    return max(LEAST, min(MOST, BUDGET // max(cases, 1)))


def embedded(timings: Sequence[Mapping[str, Any]], most: int) -> list[dict[str, Any]]:
    """Return what to embed of each process's windows, `most` blocks of each.

    Of more blocks those are kept that hold the shortest and the longest window of either side, and
    others at even distances, whole, so that both sides keep their neighbours in time.
    """
    shown = timings[:PROCESSES]
    found = [_process(t, most) for t in shown if _pairs(t)]
    return [{**one, "of": len(timings)} for one in found]


def _process(timing: Mapping[str, Any], most: int) -> dict[str, Any]:
    blocks = _blocks(timing)
    kept = _kept(blocks, most)
    details = timing.get("details")
    details = details if isinstance(details, Mapping) else {}
    facts = {k: details[k] for k in FACTS if details.get(k) is not None}
    windows = [w for i in kept for w in blocks[i]]
    return {
        "sides": "".join(side for side, _ in windows),
        "us": [float(f"{seconds * 1e6:.5g}") for _, seconds in windows],
        "blocks": len(blocks),
        "kept": kept if len(kept) < len(blocks) else None,
        "laps": _laps(timing, len(blocks)),
        "dropped": _dropped(timing),
        "looks": details.get("looks") or [],
        "facts": facts,
    }


def _pairs(timing: Mapping[str, Any]) -> bool:
    """Return whether there are windows of both sides, and numbers in them."""
    sides = [timing.get("baseline"), timing.get("optimized")]
    return all(isinstance(s, list) and s and all(_is_time(v) for v in s) for s in sides)


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _blocks(timing: Mapping[str, Any]) -> list[list[tuple[str, float]]]:
    """Return the windows by block, in order: ``b`` or ``o``, and seconds a call."""
    baseline, optimized = timing["baseline"], timing["optimized"]
    orders = timing.get("orders") or []
    if not 2 * len(orders) == len(baseline) == len(optimized):  # an order that nobody knows
        return [[("b", b), ("o", o)] for b, o in zip(baseline, optimized, strict=False)]
    blocks = []
    for i, order in enumerate(orders):
        left = {"A": list(baseline[2 * i : 2 * i + 2]), "B": list(optimized[2 * i : 2 * i + 2])}
        blocks.append([("b" if s == "A" else "o", left[s].pop(0)) for s in order if left.get(s)])
    return blocks


def _kept(blocks: Sequence[Sequence[tuple[str, float]]], most: int) -> list[int]:
    """Return the indices of the blocks to keep, in order."""
    count = len(blocks)
    if count <= most:
        return list(range(count))
    kept = set()
    for side in "bo":
        order = sorted((s, i) for i, block in enumerate(blocks) for w, s in block if w == side)
        kept |= {order[0][1], order[-1][1]}
    free = most - len(kept)
    kept |= {round(i * (count - 1) / max(free - 1, 1)) for i in range(free)}
    return sorted(kept)


def _laps(timing: Mapping[str, Any], blocks: int) -> list[int]:
    """Return before which blocks both sides were built anew: laps are of equal length."""
    laps = len(timing.get("laps") or [])
    if laps < 2 or blocks % laps:
        return []
    return list(accumulate([blocks // laps] * (laps - 1)))


def _dropped(timing: Mapping[str, Any]) -> list[list[Any]]:
    """Return cause and place, the number of blocks before it, of each block measured again."""
    causes = timing.get("dropped") or []
    places = timing.get("dropped_at") or []
    known = len(places) == len(causes)
    return [[cause, places[i] if known else None] for i, cause in enumerate(causes)]
