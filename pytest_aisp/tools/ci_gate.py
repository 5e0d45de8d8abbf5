"""`aisp ci gate`: print the combined verdict on runs from several machines."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..util.cli_result import CliResult
from . import ci_gate_comment
from .ci_gate_comment import TITLE, why
from .ci_gate_runs import Gate


def gate_result(gate: Gate, form: str) -> CliResult:
    """Return the verdict in the format `form`, or no text if a run cannot be read."""
    return CliResult([] if gate.unreadable else FORMS[form](gate), gate.exit_code)


def text(gate: Gate) -> list[str]:
    """Return a line with the verdict, and a line for each run, red case and missing product."""
    counts = f"{len(gate.runs)} runs, {sum(run.cases for run in gate.runs)} cases"
    lines = [f"{gate.headline}: {counts}"]
    for run in gate.runs:
        products = ", ".join(run.products) or "nothing timed"
        lines.append(f"{run.folder} ({products}): {run.status}")
        lines += [f"    {row.verdict} {row.nodeid}: {why(row)}" for row in run.red]
    return lines + [f"missing: no run timed {product}" for product in gate.missing]


def github(gate: Gate) -> list[str]:
    """Return commands that make GitHub's runner show annotations at the lines of the pages."""
    shown = "warning" if gate.report_only else "error"
    lines = []
    for file, line, title, reason in _annotations(gate):
        place = f"file={_escape_property(file)},line={line}," if file else ""
        lines.append(f"::{shown} {place}title={_escape_property(title)}::{_escape(reason)}")
    notice = f"::notice title={TITLE}::{gate.headline}"
    return [notice, *lines] if gate.report_only or not lines else lines


def gitlab(gate: Gate) -> list[str]:
    """Return a Code Quality report. GitLab shows its issues at the lines of the pages."""
    issues = [
        {
            "description": f"{title}: {reason}",
            "check_name": "aisp",
            "fingerprint": hashlib.sha256(f"{file} {title} {reason}".encode()).hexdigest(),
            "severity": "info" if gate.report_only else "major",
            "location": {"path": file or ".", "lines": {"begin": line}},
        }
        for file, line, title, reason in _annotations(gate)
    ]
    return json.dumps(issues, indent=1).splitlines()


def as_json(gate: Gate) -> list[str]:
    """Return the verdict, all runs, and the journal lines of red cases as JSON."""
    names = ("folder", "products", "invalid", "unfinished", "disturbed", "cases", "commit", "red")
    plain = {
        "verdict": gate.verdict,
        "exit_code": gate.exit_code,
        "report_only": gate.report_only,
        "runs": [{name: getattr(run, name) for name in names} for run in gate.runs],
        "missing": gate.missing,
    }
    return json.dumps(msgspec.to_builtins(plain), indent=1).splitlines()


FORMS: dict[str, Callable[[Gate], list[str]]] = {
    "text": text,
    "markdown": ci_gate_comment.markdown,
    "github": github,
    "gitlab": gitlab,
    "json": as_json,
}


class Annotation(NamedTuple):
    """A problem to report. `file` is the page, or empty if the problem belongs to no page."""

    file: str
    line: int
    title: str
    reason: str


def _annotations(gate: Gate) -> Iterator[Annotation]:
    for run in gate.runs:
        if run.invalid or run.unfinished or run.disturbed:
            yield Annotation("", 1, TITLE, f"{run.folder}: {run.status}")
        for row in [] if run.invalid else run.red:
            file = row.nodeid.partition("::")[0]
            title = f"{row.verdict} on {row.product}: {row.function}[{row.variant}]"
            yield Annotation(file, line_of(Path(file), row.function), title, why(row))
    for product in gate.missing:
        yield Annotation("", 1, TITLE, f"no run timed {product}")


def line_of(page: Path, function: str) -> int:
    """Return the line number of a page's test, or 1 if the page or the test does not exist."""
    try:
        tree = ast.parse(page.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return 1
    tests = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function]
    return tests[0].lineno if tests else 1


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")
