"""`report.html`: a run to look at, one file that holds all it shows and asks no network.

The page is what the folder `page` holds, put together here. Its table is HTML; scripts add
filters, the roofline and a page for each case, and a browser without scripts still has the table.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..results.artifacts import REPORT, publish
from ..util.cli_result import CliError, CliResult
from . import html as markup
from .data import report_data
from .run import ReportRun

PARTS = Path(__file__).parent / "page"
SCRIPTS = (
    "dom",
    "marks",
    "list",
    "axis",
    "roofline",
    "samples",
    "interval",
    "code",
    "case",
    "main",
)
"""In this order: each uses what those before it define."""
POLICY = "default-src 'none'; img-src data:; style-src {style}; script-src {script}"
"""What the page may load: nothing, and it runs no script but its own, whatever a case is called."""


def write(
    run: ReportRun, out: Path, history: Sequence[ReportRun] = (), pages_root: Path | None = None
) -> Path:
    """Write the report of `run` to `out`, which is returned.

    Args:
        history: other runs, for the history of each case.
        pages_root: what the paths of pages are relative to, where it is not the run's own root.

    Raises:
        OSError: where `out` cannot be written.
    """
    out.write_text(
        html(report_data(run, history, pages_root, out.absolute().parent)), encoding="utf-8"
    )
    return out


def report_result(
    folder: Path,
    history: Sequence[Path] = (),
    out: Path | None = None,
    pages_root: Path | None = None,
) -> CliResult:
    """Write the report of the run in `folder` and say where it is.

    Raises:
        Unanswerable: where a folder holds no run, or the report cannot be written.
    """
    run, before = ReportRun.read(folder), [ReportRun.read(one) for one in history]
    path = out or (run.folder or folder) / REPORT
    try:
        if run.killed is not None:
            publish(run.killed)
        write(run, path, before, pages_root)
    except OSError as error:
        raise CliError(
            f"{path}: cannot be written ({error})\n"
            "Name a file that can:\n"
            f"    aisp results report {folder} --out=report.html"
        ) from None
    return CliResult([f"{path}: {len(run.cases)} cases, {path.stat().st_size / 1e6:.2f} MB"])


def html(data: Mapping[str, Any]) -> str:
    """Return the page that embeds `data`."""
    style, script = _part("style.css"), _script()
    axis = markup.Axis.over(data["cases"])
    parts = {
        "policy": POLICY.format(style=_digest(style), script=_digest(script)),
        "title": escape(markup.title(data["run"])),
        "style": style,
        "grid": markup.grid(axis),
        "heading": escape(str(data["run"].get("name") or "Unknown machine")),
        "lead": markup.lead(data["cases"]),
        "facts": markup.facts(data["run"]),
        "banner": markup.banner(data["run"]),
        "tally": markup.tally(data["cases"]),
        "axis": markup.head(axis),
        "rows": markup.rows(data["cases"], axis),
        "data": embedded(data),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _part("page.html"))


def embedded(data: Any) -> str:
    """Return JSON that ends no script element and opens no comment, whatever it holds."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")


def _script() -> str:
    """Return all scripts as one that leaves no name behind."""
    body = "\n".join(_part(f"{name}.js") for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{body}\n}})();\n'


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
