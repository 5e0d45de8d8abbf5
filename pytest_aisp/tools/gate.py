"""`aisp ci gate`: the runs of several machines as one verdict.

A run is a folder of artifacts. Of a run that is invalid no verdict counts; a product that was
expected and not timed by a valid run is as red as a case. The exit code is pytest's: 0, 1 or 17.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..results import run_reader
from ..results.export import table
from ..results.row import Row
from ..results.verdict import INVALID_RUN, RED, environment_moved
from ..util.cli_result import CliError, CliResult

ENDED = (0, 1, INVALID_RUN)
"""Exit codes of pytest that say something of the cases."""


@dataclass(frozen=True)
class GateRun:
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

    runs: tuple[GateRun, ...]
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


def read(folder: Path) -> GateRun:
    """Return what a folder of artifacts says.

    Raises:
        Unanswerable: where it holds no run.
    """
    try:
        run = run_reader.load(folder)
    except run_reader.RunError as error:
        raise CliError(str(error)) from None
    red = tuple(dict(row) for row in run.lines if row["verdict"] in RED)
    return GateRun(
        folder=str(folder),
        products=tuple(sorted({row["product"] for row in run.lines if _measured(row)})),
        invalid=_invalid(run),
        unfinished=_unfinished(run, red),
        red=red,
        cases=len(run.lines),
    )


def judge(runs: Sequence[GateRun], expected: Sequence[str]) -> Gate:
    """Return the one verdict of `runs`, of which each of the `expected` products is to be there."""
    timed = {product for run in runs if not run.invalid for product in run.products}
    invalid = {product for run in runs if run.invalid for product in run.products}
    # A product whose run is invalid was there: it is measured again, not looked for.
    return Gate(tuple(runs), tuple(p for p in expected if p not in timed | invalid))


def gate_result(
    folders: Sequence[Path], expected: Sequence[str], *, form: str, root: Path
) -> CliResult:
    """Return the verdict of the runs in `folders`, in one of `gate_forms.FORMS`.

    Args:
        root: where the pages lie, for their lines.

    Raises:
        Unanswerable: for a folder that holds no run.
    """
    found = judge([read(folder) for folder in folders], expected)
    return CliResult(FORMS[form](found.to_json(), root), found.code)


def _measured(row: Mapping[str, Any]) -> bool:
    return row["value"] is not None or bool(row["goals"])


def _invalid(run: run_reader.RecordedRun) -> str:
    wrong = [found["wrong"] for found in run.canaries if found["wrong"]]
    if wrong:
        return f"canary: {wrong[0]}"
    if environment_moved(run.lines):
        return "environment moved"
    ended = run.manifest.get("exit_code")
    return f"pytest ended with {INVALID_RUN}: no verdict counts" if ended == INVALID_RUN else ""


def _unfinished(run: run_reader.RecordedRun, red: Sequence[Any]) -> str:
    code = run.manifest.get("exit_code")
    if code is None and not run.manifest["complete"]:
        return "pytest was killed"
    if not run.lines:
        return "it holds no case"
    if code not in ENDED:
        return f"pytest ended with {code}"
    return "pytest ended with 1, though none of its cases is red" if code == 1 and not red else ""


Found = Mapping[str, Any]
Form = Callable[[Found, Path], list[str]]
RUN_HEADS = ("run", "products", "cases", "verdict")
RED_HEADS = ("case", "product", "verdict", "speedup [99 %]", "why")


def text(found: Found, root: Path) -> list[str]:
    """Return the verdict, then a line for everything behind it."""
    del root
    counts = f"{len(found['runs'])} runs, {sum(run['cases'] for run in found['runs'])} cases"
    lines = [f"{found['verdict']}: {counts}"]
    for run in found["runs"]:
        products = ", ".join(run["products"]) or "nothing timed"
        lines.append(f"{run['folder']} ({products}): {_state(run)}")
        lines += [f"    {row['verdict']} {row['nodeid']}: {_why(row)}" for row in run["red"]]
    return lines + [f"missing: no run has timed {product}" for product in found["missing"]]


def markdown(found: Found, root: Path) -> list[str]:
    """Return a summary: a table of runs, a table of red cases."""
    del root
    runs = [
        (run["folder"], ", ".join(run["products"]), str(run["cases"]), _state(run))
        for run in found["runs"]
    ]
    runs += [("-", product, "0", "missing") for product in found["missing"]]
    lines = [f"## Performance gate: {found['verdict']}", "", *table(RUN_HEADS, runs)]
    red = [_red_cells(row) for run in found["runs"] for row in run["red"]]
    return [*lines, "", *table(RED_HEADS, red)] if red else lines


def _red_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    speedup = Row.of(row).headline() if row["value"] is not None else "-"
    return f"`{row['nodeid']}`", row["product"], row["verdict"], speedup, _why(row)


def github(found: Found, root: Path) -> list[str]:
    """Return commands that GitHub's runner turns into annotations at the pages' lines."""
    lines = []
    for file, line, title, why in _marks(found, root):
        place = f"file={_escaped(file)},line={line}," if file else ""
        lines.append(f"::error {place}title={_escaped(title)}::{_data(why)}")
    return lines or ["::notice title=Performance gate::green"]


def gitlab(found: Found, root: Path) -> list[str]:
    """Return a Code Quality report, which GitLab shows at the pages' lines."""
    issues = [
        {
            "description": f"{title}: {why}",
            "check_name": "aisp",
            "fingerprint": hashlib.sha256(f"{file} {title} {why}".encode()).hexdigest(),
            "severity": "major",
            "location": {"path": file or ".", "lines": {"begin": line}},
        }
        for file, line, title, why in _marks(found, root)
    ]
    return json.dumps(issues, indent=1).splitlines()


def as_json(found: Found, root: Path) -> list[str]:
    """Return all that is known, rows and all."""
    del root
    return json.dumps(found, indent=1).splitlines()


FORMS: dict[str, Form] = {
    "text": text,
    "markdown": markdown,
    "github": github,
    "gitlab": gitlab,
    "json": as_json,
}


def line_of(page: Path, function: str) -> int:
    """Return the line on which a page's test stands; 1 where the page is not here as it was."""
    try:
        tree = ast.parse(page.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return 1
    names = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function]
    return names[0].lineno if names else 1


def _marks(found: Found, root: Path) -> Iterator[tuple[str, int, str, str]]:
    """Yield file, line, title and text of everything that is not green."""
    for run in found["runs"]:
        if run["invalid"] or run["unfinished"]:
            yield "", 1, "Performance gate", f"{run['folder']}: {_state(run)}"
        for row in () if run["invalid"] else run["red"]:
            file = row["nodeid"].partition("::")[0]
            title = f"{row['verdict']} on {row['product']}: {row['function']}[{row['variant']}]"
            yield file, line_of(root / file, row["function"]), title, _why(row)
    for product in found["missing"]:
        yield "", 1, "Performance gate", f"no run has timed {product}"


def _state(run: Mapping[str, Any]) -> str:
    if run["invalid"]:
        return f"invalid, no verdict counts ({run['invalid']})"
    parts = [f"{len(run['red'])} of {run['cases']} cases are red"] if run["red"] else []
    parts += [run["unfinished"]] if run["unfinished"] else []
    return "; ".join(parts) or "green"


def _why(row: Mapping[str, Any]) -> str:
    return "; ".join(row["reasons"]) or "its log says why"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escaped(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
