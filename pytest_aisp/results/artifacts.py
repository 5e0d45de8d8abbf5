"""`results.jsonl`: the row of every finished case, a line each, whole lines only.

Beside it `canaries.jsonl`, what became of each process's canary.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


class Artifacts:
    """The folder of a run's results and samples; a new run starts it anew.

    Attributes:
        path: the file of rows.
        canaries: the file of canaries.

    Raises:
        OSError: where the folder cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self.canaries = folder / "results.jsonl", folder / "canaries.jsonl"
        self._given: dict[Path, int] = {}
        self._lost: dict[Path, list[str]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self.path.write_text("")
        self.canaries.unlink(missing_ok=True)

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row; where the disk refuses it, the run goes on and `error` says so."""
        self._write(self.path, row)

    def add_canary(self, found: Mapping[str, Any]) -> None:
        """Append what became of a canary, likewise."""
        self._write(self.canaries, found)

    def _write(self, path: Path, plain: Mapping[str, Any]) -> None:
        self._given[path] = self._given.get(path, 0) + 1
        try:
            _append(path, json.dumps(plain).encode() + b"\n")
        except OSError as error:
            self._lost.setdefault(path, []).append(str(error))

    @property
    def error(self) -> str | None:
        """What the files lack, why, and what to do; or None."""
        if not self._lost:
            return None
        lacking = [
            f"{path} lacks {len(why)} of {self._given[path]} results: {why[0]}"
            for path, why in self._lost.items()
        ]
        free = f"    Free space in {self.path.parent}, then run the same command again."
        return "\n".join([*lacking, free])


def _append(path: Path, line: bytes) -> None:
    """Append the whole line, or nothing: half a line would spoil the next one."""
    with open(path, "ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[file.write(line) :]
        except BaseException:
            with suppress(OSError):
                file.truncate(end)
            raise
