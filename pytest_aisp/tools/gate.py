"""`aisp gate`: the runs of several machines as one verdict.

A run is a folder of artifacts. Of a run that is invalid no verdict counts; a product that was
expected and not timed by a valid run is as red as a case. The exit code is pytest's: 0, 1 or 17.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..common.answers import Answer, Unanswerable
from ..results import runs
from ..results.verdict import INVALID_RUN, RED, environment_moved
from . import gate_forms

ENDED = (0, 1, INVALID_RUN)
"""Exit codes of pytest that say something of the cases."""


@dataclass(frozen=True)
class Run:
    """What one folder says.

    Attributes:
        products: those of which it timed a case, or counted what one takes.
        invalid: why no verdict of it counts, or empty.
        unfinished: why its rows are not the whole of it, or empty.
        red: the rows that are red.
        cases: how many rows there are.
    """

    folder: str
    products: tuple[str, ...]
    invalid: str
    unfinished: str
    red: tuple[dict[str, Any], ...]
    cases: int


@dataclass(frozen=True)
class Gate:
    """All runs together, and the expected products that no valid run has timed."""

    runs: tuple[Run, ...]
    missing: tuple[str, ...]

    @property
    def word(self) -> str:
        """Return ``red``, ``invalid`` or ``green``."""
        if self.missing or any(
            (run.red or run.unfinished) and not run.invalid for run in self.runs
        ):
            return "red"
        return "invalid" if any(run.invalid for run in self.runs) else "green"

    @property
    def code(self) -> int:
        """Return the exit code of pytest for it."""
        return {"green": 0, "red": 1, "invalid": INVALID_RUN}[self.word]

    def to_json(self) -> dict[str, Any]:
        """Return plain types."""
        return {"verdict": self.word, "exit_code": self.code, **asdict(self)}


def read(folder: Path) -> Run:
    """Return what a folder of artifacts says.

    Raises:
        Unanswerable: where it holds no run.
    """
    try:
        run = runs.load(folder)
    except runs.RunError as error:
        raise Unanswerable(str(error)) from None
    red = tuple(dict(row) for row in run.lines if row["verdict"] in RED)
    return Run(
        folder=str(folder),
        products=tuple(sorted({row["product"] for row in run.lines if _measured(row)})),
        invalid=_invalid(run),
        unfinished=_unfinished(run, red),
        red=red,
        cases=len(run.lines),
    )


def judge(runs: Sequence[Run], expected: Sequence[str]) -> Gate:
    """Return the one verdict of `runs`, of which each of the `expected` products is to be there."""
    timed = {product for run in runs if not run.invalid for product in run.products}
    invalid = {product for run in runs if run.invalid for product in run.products}
    # A product whose run is invalid was there: it is measured again, not looked for.
    return Gate(tuple(runs), tuple(p for p in expected if p not in timed | invalid))


def answer(folders: Sequence[Path], expected: Sequence[str], *, form: str, root: Path) -> Answer:
    """Return the verdict of the runs in `folders`, in one of `gate_forms.FORMS`.

    Args:
        root: where the pages lie, for their lines.

    Raises:
        Unanswerable: for a folder that holds no run.
    """
    found = judge([read(folder) for folder in folders], expected)
    return Answer(gate_forms.FORMS[form](found.to_json(), root), found.code)


def _measured(row: Mapping[str, Any]) -> bool:
    return row["value"] is not None or bool(row["goals"])


def _invalid(run: runs.Run) -> str:
    wrong = [found["wrong"] for found in run.canaries if found["wrong"]]
    if wrong:
        return f"canary: {wrong[0]}"
    if environment_moved(run.lines):
        return "environment moved"
    ended = run.manifest.get("exit_code")
    return f"pytest ended with {INVALID_RUN}: no verdict counts" if ended == INVALID_RUN else ""


def _unfinished(run: runs.Run, red: Sequence[Any]) -> str:
    code = run.manifest.get("exit_code")
    if code is None and not run.manifest["complete"]:
        return "pytest was killed"
    if not run.lines:
        return "it holds no case"
    if code not in ENDED:
        return f"pytest ended with {code}"
    return "pytest ended with 1, though none of its cases is red" if code == 1 and not red else ""
