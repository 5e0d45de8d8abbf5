"""Judge a recorded run again: the samples of its artifacts answer in the bench's place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..results import run_reader
from ..results.export import path_below
from ..results.messages import CaseTask, CheckTask, CountTask, FactsTask, Reply, Task
from ..util.device import Machine

Name = tuple[str, str, int]
"""What makes a case the same in another run: its page below the root, its key there, its GPUs."""


class ReplayError(Exception):
    """A file that holds no recorded rows."""


class ReplayWorker:
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
        folder = run_reader.folder_of(path)
        file = folder / run_reader.JOURNAL if folder.is_dir() else path
        try:
            lines, lost = run_reader.journal(file)
            known = (file.parent / run_reader.MANIFEST).exists()
            manifest = run_reader.manifest(file.parent) if known else {}
        except run_reader.RunError as error:
            raise ReplayError(f"--aisp-replay={path}: no run to judge again: {error}") from None
        self._folder, self.dropped = file.parent, "; ".join(lost)
        self.machine = _machine(manifest["machine"]) if known else None
        self.rows: dict[Name, Any] = {_of_row(line, manifest.get("root")): line for line in lines}
        self._asked: dict[tuple[Name, str], int] = {}

    def ask(self, task: Task, seconds: float, progress: Callable[[str], None]) -> Reply:
        """Return what was recorded for `task`, timings in the order in which they were taken."""
        del seconds, progress
        if not isinstance(task, CaseTask):
            return Reply(error="page", message=f"the recording holds no {task.kind}")
        asked = _of_task(task)
        row = self.rows.get(asked)
        if row is None:
            name = f"{task.function}[{task.variant}] at {dict(task.size)}"
            why = f"; {self.dropped}" if self.dropped else ""
            return Reply(error="page", message=f"the recording holds no {name}{why}")
        if isinstance(task, FactsTask):
            return Reply(result=row["environment"])
        kind = "checks" if isinstance(task, (CheckTask, CountTask)) else "timings"
        try:
            answers = run_reader.read(self._folder, row["samples"])[kind]
        except run_reader.SamplesError as error:
            return Reply(error="page", message=f"the recording cannot be judged again: {error}")
        number = self._asked.get((asked, kind), 0)
        self._asked[asked, kind] = number + 1
        if number >= len(answers):
            some = kind if len(answers) != 1 else kind.removesuffix("s")
            message = f"the recording holds {len(answers)} {some} of it, and one more is asked for"
            return Reply(error="unrecorded", message=message)
        return Reply(result=answers[number])

    def close(self) -> None:
        """Nothing to release."""


def _of_row(row: Mapping[str, Any], root: str | None) -> Name:
    # Without a manifest nothing says where the root was; an id is relative to it.
    page = row["nodeid"].partition("::")[0] if root is None else path_below(row["page"], root)
    return page, row["key"], row["gpus"]


def _of_task(task: CaseTask) -> Name:
    key = f"{Path(task.page).name}::{task.function}[{task.case}]"
    return path_below(task.page, task.root), key, task.gpus


def _machine(plain: Mapping[str, Any]) -> Machine:
    known = {f.name: plain[f.name] for f in fields(Machine)}
    return Machine(**{**known, "gpus": tuple(plain["gpus"])})
