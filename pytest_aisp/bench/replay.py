"""Judge a recorded run again: the samples of its artifacts answer in the bench's place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..common.device import Machine
from ..results import runs, samples
from ..results.messages import Reply, Task


class RecordingError(Exception):
    """A file that holds no recorded rows."""


class Recording:
    """A bench that answers from a recorded run.

    Args:
        path: `results.jsonl` of an artifacts folder, or the folder.

    Attributes:
        dropped: what was left out because its writer died before its line was whole, or empty.
        machine: where it was recorded, so that it is judged as that; None where nobody says.

    Raises:
        RecordingError: for a file that cannot be read as one.
    """

    def __init__(self, path: Path) -> None:
        folder = runs.folder_of(path)
        file = folder / runs.JOURNAL if folder.is_dir() else path
        try:
            lines, lost = runs.journal(file)
            known = (file.parent / runs.MANIFEST).exists()
            self.machine = _machine(runs.manifest(file.parent)["machine"]) if known else None
        except runs.RunError as error:
            raise RecordingError(f"--aisp-replay={path}: no run to judge again: {error}") from None
        self._folder, self.dropped = file.parent, "; ".join(lost)
        self.rows: dict[str, Any] = {line["key"]: line for line in lines}
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
        try:
            answers = samples.read(self._folder, row["samples"])[kind]
        except samples.SamplesError as error:
            return Reply(error="page", message=f"the recording cannot be judged again: {error}")
        number = self._asked.get(f"{row['key']}{kind}", 0)
        self._asked[f"{row['key']}{kind}"] = number + 1
        if number >= len(answers):
            return Reply(error="page", message=f"the recording holds {number} {kind} of it")
        return Reply(result=answers[number])

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


def _machine(plain: Mapping[str, Any]) -> Machine:
    known = {f.name: plain[f.name] for f in fields(Machine)}
    return Machine(**{**known, "gpus": tuple(plain["gpus"])})
