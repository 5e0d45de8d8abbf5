"""`aisp ci gate`: combine the runs of several machines into one verdict.

Each run is a folder of artifacts. The verdicts of an invalid run are ignored. The combined verdict
is red if a case is red or an expected product is missing. The exit code is the one that pytest uses
for the same verdict: 0, 1 or 17.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from ..results import run_reader
from ..results.export import table
from ..results.row import JournalLine
from ..results.verdict import DISTURBED, INVALID_RUN, RED, environment_moved
from ..util.cli_result import CliError, CliResult

COMPLETE = (0, 1, INVALID_RUN)
"""The exit codes with which pytest ends if it ran all its cases."""


@dataclass(frozen=True)
class GateRun:
    """The content of one folder of artifacts.

    Attributes:
        products: the products for which the run timed a case or counted metrics.
        invalid: the reason why the run's verdicts are ignored, or an empty string.
        unfinished: the reason why some cases may be missing, or an empty string.
        disturbed: the number of cases that got no verdict, and why, or an empty string.
        red: the journal's lines of the red cases.
        cases: the number of cases.
    """

    folder: str
    products: tuple[str, ...]
    invalid: str
    unfinished: str
    disturbed: str
    red: tuple[JournalLine, ...]
    cases: int

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
    """All runs, and the expected products that no run timed."""

    runs: tuple[GateRun, ...]
    missing: tuple[str, ...]

    @property
    def verdict(self) -> Literal["red", "invalid", "green"]:
        failed = any((run.red or run.unfinished) and not run.invalid for run in self.runs)
        if self.missing or failed:
            return "red"
        return "invalid" if any(run.invalid or run.disturbed for run in self.runs) else "green"

    @property
    def exit_code(self) -> int:
        return {"green": 0, "red": 1, "invalid": INVALID_RUN}[self.verdict]


def gate_result(folders: Sequence[Path], expected: Sequence[str], *, form: str) -> CliResult:
    """Return the verdict on the runs in `folders`, which must cover the `expected` products."""
    gate = judge([read(folder) for folder in folders], expected)
    return CliResult(FORMS[form](gate), gate.exit_code)


def judge(runs: Sequence[GateRun], expected: Sequence[str]) -> Gate:
    # A product whose run is invalid is not missing: that run must be repeated.
    seen = {product for run in runs for product in run.products}
    return Gate(tuple(runs), tuple(product for product in expected if product not in seen))


def read(folder: Path) -> GateRun:
    """Return the run in a folder of artifacts."""
    try:
        run = run_reader.load(folder)
    except run_reader.RunError as error:
        raise CliError(str(error)) from None
    red = tuple(line for line in run.lines if line.verdict in RED)
    measured = [line for line in run.lines if line.value is not None or line.goals]
    return GateRun(
        folder=str(folder),
        products=tuple(sorted({line.product for line in measured})),
        invalid=_why_invalid(run),
        unfinished=_why_unfinished(run, len(red)),
        disturbed=_why_disturbed(run),
        red=red,
        cases=len(run.lines),
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


RUN_HEADS = ("run", "products", "cases", "verdict")
RED_HEADS = ("case", "product", "verdict", "speedup [99 %]", "why")
TITLE = "Performance gate"


def text(gate: Gate) -> list[str]:
    """Return a line with the verdict, followed by one line for each reason."""
    counts = f"{len(gate.runs)} runs, {sum(run.cases for run in gate.runs)} cases"
    lines = [f"{gate.verdict}: {counts}"]
    for run in gate.runs:
        products = ", ".join(run.products) or "nothing timed"
        lines.append(f"{run.folder} ({products}): {run.status}")
        lines += [f"    {row.verdict} {row.nodeid}: {_why(row)}" for row in run.red]
    return lines + [f"missing: no run timed {product}" for product in gate.missing]


def markdown(gate: Gate) -> list[str]:
    """Return a table of the runs and a table of the red cases."""
    runs = [(run.folder, ", ".join(run.products), str(run.cases), run.status) for run in gate.runs]
    runs += [("-", product, "0", "missing") for product in gate.missing]
    lines = [f"## {TITLE}: {gate.verdict}", "", *table(RUN_HEADS, runs)]
    red = []
    for row in (row for run in gate.runs for row in run.red):
        speedup = "-" if row.value is None else row.headline()
        red.append((f"`{row.nodeid}`", row.product, row.verdict, speedup, _why(row)))
    return [*lines, "", *table(RED_HEADS, red)] if red else lines


def github(gate: Gate) -> list[str]:
    """Return commands that make GitHub's runner show annotations at the lines of the pages."""
    lines = []
    for file, line, title, why in _annotations(gate):
        place = f"file={_escape_property(file)},line={line}," if file else ""
        lines.append(f"::error {place}title={_escape_property(title)}::{_escape(why)}")
    return lines or [f"::notice title={TITLE}::green"]


def gitlab(gate: Gate) -> list[str]:
    """Return a Code Quality report, which GitLab shows at the lines of the pages."""
    issues = [
        {
            "description": f"{title}: {why}",
            "check_name": "aisp",
            "fingerprint": hashlib.sha256(f"{file} {title} {why}".encode()).hexdigest(),
            "severity": "major",
            "location": {"path": file or ".", "lines": {"begin": line}},
        }
        for file, line, title, why in _annotations(gate)
    ]
    return json.dumps(issues, indent=1).splitlines()


def as_json(gate: Gate) -> list[str]:
    """Return the verdict and all runs as JSON, with the journal's lines of the red cases."""
    plain = {"verdict": gate.verdict, "exit_code": gate.exit_code, **msgspec.to_builtins(gate)}
    return json.dumps(plain, indent=1).splitlines()


FORMS: dict[str, Callable[[Gate], list[str]]] = {
    "text": text,
    "markdown": markdown,
    "github": github,
    "gitlab": gitlab,
    "json": as_json,
}


class Annotation(NamedTuple):
    """A problem to report. If it has no file, it does not belong to a page."""

    file: str
    line: int
    title: str
    why: str


def _annotations(gate: Gate) -> Iterator[Annotation]:
    for run in gate.runs:
        if run.invalid or run.unfinished or run.disturbed:
            yield Annotation("", 1, TITLE, f"{run.folder}: {run.status}")
        for row in [] if run.invalid else run.red:
            file = row.nodeid.partition("::")[0]
            title = f"{row.verdict} on {row.product}: {row.function}[{row.variant}]"
            yield Annotation(file, line_of(Path(file), row.function), title, _why(row))
    for product in gate.missing:
        yield Annotation("", 1, TITLE, f"no run timed {product}")


def line_of(page: Path, function: str) -> int:
    """Return the line of a page's test, or 1 if the page does not exist here or lacks the test."""
    try:
        tree = ast.parse(page.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return 1
    tests = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function]
    return tests[0].lineno if tests else 1


def _why(row: JournalLine) -> str:
    return "; ".join(row.reasons) or "see its log"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")
