"""Judge a recorded run again: the samples of `results.jsonl` answer in the bench's place."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..results.messages import Reply, Task


class RecordingError(Exception):
    """A file that holds no recorded rows."""


class Recording:
    """A bench that answers from a recorded run.

    Args:
        path: `results.jsonl` of an artifacts folder, or the folder.

    Attributes:
        dropped: what was left out because its writer died before its line was whole, or empty.

    Raises:
        RecordingError: for a file that cannot be read as one.
    """

    def __init__(self, path: Path) -> None:
        file = path / "results.jsonl" if path.is_dir() else path
        try:
            rows, self.dropped = _rows(file.read_text())
            self.rows: dict[str, Any] = {row["key"]: row for row in rows}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RecordingError(
                f"--aisp-replay={path}: not the results.jsonl of a run with --aisp-artifacts"
                f" ({error})"
            ) from None
        self._asked: dict[str, int] = {}

    def ask(self, task: Task, seconds: float, progress: Callable[[str], None]) -> Reply:
        """Return what was recorded for `task`, timings in the order in which they were taken."""
        del seconds, progress
        row = next((r for r in self.rows.values() if self._is(r, task)), None)
        if row is None:
            name = f"{task.function}[{task.variant}] at {dict(task.size)}"
            why = f"; {self.dropped}" if self.dropped else ""
            return Reply(error="page", message=f"the recording holds no {name}{why}")
        if task.kind == "facts":
            return Reply(result=row["environment"])
        kind = "checks" if task.kind in ("check", "count") else "timings"
        number = self._asked.get(f"{row['key']}{kind}", 0)
        self._asked[f"{row['key']}{kind}"] = number + 1
        if number >= len(row[kind]):
            return Reply(error="page", message=f"the recording holds {number} {kind} of it")
        return Reply(result=row[kind][number])

    @staticmethod
    def _is(row: dict[str, Any], task: Task) -> bool:
        same = row["function"] == task.function and row["variant"] == task.variant
        return (
            same
            and row["size"] == dict(task.size)
            and Path(row["page"]).name == Path(task.page).name
        )

    def close(self) -> None:
        """Nothing to release."""


def _rows(text: str) -> tuple[list[Any], str]:
    """Return the rows, and which one is left out: a last line that nobody finished."""
    *lines, last = text.split("\n")
    rows = [json.loads(line) for line in lines]
    try:
        return rows + ([json.loads(last)] if last else []), ""
    except ValueError:
        if not rows:
            raise
    case = re.search(r'"nodeid": "([^"]*)"', last)
    of = f", of {case[1]}," if case else ""
    return rows, f"its last line{of} is half written and was left out"
