"""Folders of artifacts: the rows and canaries that a run has left in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..common.answers import Unanswerable


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run; of a run that was killed, those that are whole.

    Raises:
        Unanswerable: for a folder that holds no run.
    """
    rows = _lines(folder / "results.jsonl", folder)
    if not all(isinstance(row, dict) and {"nodeid", "verdict"} <= row.keys() for row in rows):
        raise _no_run(folder, "its results.jsonl holds other rows")
    return rows


def canaries_of(folder: Path) -> list[dict[str, Any]]:
    """Return what became of the run's canaries; nothing where none sang.

    Raises:
        Unanswerable: for a file that is none of ours.
    """
    file = folder / "canaries.jsonl"
    return _lines(file, folder) if file.exists() else []


def _lines(file: Path, folder: Path) -> list[Any]:
    try:
        *whole, last = file.read_text(encoding="utf-8").split("\n")
        lines = [json.loads(line) for line in whole]
    except (OSError, ValueError) as error:
        raise _no_run(folder, str(error)) from None
    try:
        return [*lines, json.loads(last)] if last else lines
    except ValueError:  # its writer died before the line was whole
        return lines


def _no_run(folder: Path, why: str) -> Unanswerable:
    return Unanswerable(
        f"{folder} is not the folder of a run ({why}); legal is what --aisp-artifacts wrote\n"
        "    pytest --aisp-artifacts=out"
    )
