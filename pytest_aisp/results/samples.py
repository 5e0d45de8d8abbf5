"""`samples/<number>-<case>.json`: the bench process's full answers about one case.

The journal's line has the file's path and hash, so that nothing is judged again on other samples.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from .published import SAMPLES

FOLDER = "samples"
LONGEST = 100
"""Characters of a case in a file's name: file systems take 255 bytes."""
OURS = re.compile(r"\d{4,}-[A-Za-z0-9.=,_-]+\.json")
UNWRITTEN = "its samples were not written: the disk refused them"


class SamplesError(Exception):
    """Samples that are missing, or are not those that the journal means."""


def split(row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a row without its samples, and these."""
    return (
        {name: value for name, value in row.items() if name not in SAMPLES},
        {name: row[name] for name in SAMPLES if name in row},
    )


def name_of(number: int, case: str) -> str:
    """Return the file's name: letters that every file system takes; the number makes it unique."""
    safe = re.sub(r"[^A-Za-z0-9.=,_-]", "_", case)[-LONGEST:]
    return f"{number:04d}-{safe}.json"


def write(folder: Path, number: int, case: str, samples: Mapping[str, Any]) -> dict[str, str]:
    """Write the samples of a case as a whole; return their path below `folder`, and their hash.

    Raises:
        OSError: where they cannot be written; then there is no file.
    """
    data = json.dumps(samples).encode()
    path = PurePosixPath(FOLDER, name_of(number, case))
    replace(folder / path, data)
    return {"path": str(path), "sha256": hashlib.sha256(data).hexdigest()}


def read(folder: Path, at: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the samples that a line of the journal in `folder` means.

    Raises:
        SamplesError: where there are none, or others.
    """
    if at is None:
        raise SamplesError(UNWRITTEN)
    path = folder / at["path"]
    if not path.resolve().is_relative_to(folder.resolve()):
        raise SamplesError(f"{at['path']}: samples lie below their run's folder, in {FOLDER}/")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SamplesError(
            f"{path}: its samples are missing: {error.strerror}\n"
            f"Copy the whole folder of the run, {FOLDER}/ too"
        ) from None
    found = hashlib.sha256(data).hexdigest()
    if found != at["sha256"]:
        raise SamplesError(
            f"{path}: these are not the samples that the run has written: SHA-256"
            f" {found[:12]}..., not {at['sha256'][:12]}...\nCopy the folder of the run again"
        )
    return dict(json.loads(data))


def clear(folder: Path) -> None:
    """Remove the samples of an earlier run, and nothing else."""
    for file in (folder / FOLDER).glob("*.json"):
        if OURS.fullmatch(file.name):
            file.unlink()


def replace(path: Path, data: bytes) -> None:
    """Write a file as a whole, or leave it as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
