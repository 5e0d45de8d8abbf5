"""The verdict of `aisp gate` as people and services read it: text, Markdown, annotations, JSON."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..results.row import Row
from ..results.sheets import table

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
