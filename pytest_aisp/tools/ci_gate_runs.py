"""The runs that `aisp ci gate` combines, and their combined verdict.

Each run is a folder of artifacts. The verdicts of an invalid run are ignored. The combined verdict
is red if a case is red, a run is unfinished, or an expected product is missing. The exit code is 0,
1 or 17, as in pytest for the same verdict. If a run cannot be read, the exit code is 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..results import run_reader
from ..results.messages import Json
from ..results.row import JournalLine
from ..results.verdict import DISTURBED, INVALID_RUN, RED, environment_moved
from ..util.cli_result import CliError

COMPLETE = (0, 1, INVALID_RUN)
"""The exit codes of a pytest process that ran all its cases."""


@dataclass(frozen=True)
class GateRun:
    """The content of one folder of artifacts.

    Attributes:
        products: the products for which the run timed a case or counted metrics.
        invalid: the reason why the run's verdicts are ignored, or an empty string.
        unfinished: the reason why some cases may be missing, or an empty string.
        disturbed: a note on the cases whose measurement was disturbed, or an empty string.
        lines: the journal's lines, one for each case.
        commit: the first digits of the commit that was measured, or an empty string.
        options: the settings of the run.
    """

    folder: str
    products: tuple[str, ...]
    invalid: str
    unfinished: str
    disturbed: str
    lines: tuple[JournalLine, ...]
    commit: str = ""
    options: Mapping[str, Json] = field(default_factory=dict)

    @property
    def red(self) -> tuple[JournalLine, ...]:
        """The lines of the red cases."""
        return tuple(line for line in self.lines if line.verdict in RED)

    @property
    def cases(self) -> int:
        """The number of cases."""
        return len(self.lines)

    @property
    def status(self) -> str:
        """The verdict on this run, with the reason."""
        if self.invalid:
            return f"invalid, its verdicts do not count ({self.invalid})"
        parts = [f"{len(self.red)} of {self.cases} cases are red"] if self.red else []
        parts += [text for text in (self.unfinished, self.disturbed) if text]
        return "; ".join(parts) or "green"


@dataclass(frozen=True)
class Gate:
    """All runs of a gate, and the runs and products that are missing.

    Attributes:
        runs: the runs that could be read.
        missing: the expected products that no run timed.
        unreadable: a message about each folder that has no readable run.
        report_only: whether the exit code is 0 for every verdict.
    """

    runs: tuple[GateRun, ...]
    missing: tuple[str, ...]
    unreadable: tuple[str, ...] = ()
    report_only: bool = False

    @property
    def verdict(self) -> Literal["red", "invalid", "green", "none"]:
        """The verdict on all runs, or `none` if a run cannot be read."""
        if self.unreadable:
            return "none"
        failed = any((run.red or run.unfinished) and not run.invalid for run in self.runs)
        if self.missing or failed:
            return "red"
        return "invalid" if any(run.invalid or run.disturbed for run in self.runs) else "green"

    @property
    def headline(self) -> str:
        """The verdict, with a note if the gate only reports it."""
        word = "no verdict" if self.verdict == "none" else self.verdict
        if not self.report_only or self.unreadable:
            return word
        return (
            f"{word} (report only)" if word == "green" else f"{word}, did not block (report only)"
        )

    @property
    def exit_code(self) -> int:
        codes = {"green": 0, "red": 1, "invalid": INVALID_RUN, "none": 2}
        return 0 if self.report_only and not self.unreadable else codes[self.verdict]


def collect(folders: Sequence[Path], expected: Sequence[str], *, report_only: bool = False) -> Gate:
    """Read and judge the runs in `folders`. The runs must include the `expected` products."""
    runs, unreadable = [], []
    for folder in folders:
        try:
            runs.append(read(folder))
        except CliError as error:
            unreadable.append(str(error))
    return judge(runs, expected, unreadable, report_only=report_only)


def judge(
    runs: Sequence[GateRun],
    expected: Sequence[str],
    unreadable: Sequence[str] = (),
    *,
    report_only: bool = False,
) -> Gate:
    # A product with an invalid run is not missing: the run has to be repeated.
    seen = {product for run in runs for product in run.products}
    missing = tuple(product for product in expected if product not in seen)
    return Gate(tuple(runs), missing, tuple(unreadable), report_only)


def read(folder: Path) -> GateRun:
    """Return the run in a folder of artifacts. Raise `CliError` if there is none."""
    try:
        run = run_reader.load(folder)
    except run_reader.RunError as error:
        raise CliError(str(error)) from None
    red = sum(line.verdict in RED for line in run.lines)
    measured = [line for line in run.lines if line.value is not None or line.goals]
    git = run.manifest.git
    return GateRun(
        folder=str(folder),
        products=tuple(sorted({line.product for line in measured})),
        invalid=_why_invalid(run),
        unfinished=_why_unfinished(run, red),
        disturbed=_why_disturbed(run),
        lines=run.lines,
        commit=git.commit[:12] if git and git.commit else "",
        options=run.manifest.options,
    )


def _why_invalid(run: run_reader.RecordedRun) -> str:
    wrong = [canary.wrong for canary in run.canaries if canary.wrong]
    if wrong:
        return f"canary: {wrong[0]}"
    if environment_moved(run.lines):
        return "environment moved"
    ended = run.manifest.exit_code
    unexplained = ended == INVALID_RUN and not _why_disturbed(run)
    return f"pytest ended with exit code {INVALID_RUN}" if unexplained else ""


def _why_disturbed(run: run_reader.RecordedRun) -> str:
    lines = [line for line in run.lines if line.verdict == DISTURBED]
    if not lines:
        return ""
    return f"{len(lines)} of {len(run.lines)} cases were disturbed ({'; '.join(lines[0].reasons)})"


def _why_unfinished(run: run_reader.RecordedRun, red: int) -> str:
    code = run.manifest.exit_code
    if code is None and not run.manifest.complete:
        return "pytest was killed"
    if not run.lines:
        return "it contains no case"
    if code not in COMPLETE:
        return f"pytest ended with exit code {code}"
    return "pytest ended with exit code 1, but no case is red" if code == 1 and not red else ""
