"""`report.html`: a run to look at, one file that holds all it shows and asks no network.

The page is what the folder `report_page` holds, put together here. Its table is HTML; scripts add
filters, the roofline and a page for each case, and a browser without scripts still has the table.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..common.answers import Answer, Unanswerable
from . import report_table as table
from ..results.verdict import RED
from .report_data import ORDER, report_data
from .report_run import Run

PARTS = Path(__file__).parent / "report_page"
SCRIPTS = ("dom", "marks", "list", "roofline", "samples", "interval", "code", "case", "main")
"""In this order: each uses what those before it define."""
POLICY = "default-src 'none'; img-src data:; style-src {style}; script-src {script}"
"""What the page may load: nothing, and it runs no script but its own, whatever a case is called."""


def write(run: Run, out: Path, history: Sequence[Run] = (), pages_root: Path | None = None) -> Path:
    """Write the report of `run` to `out`, which is returned.

    Args:
        history: other runs, for the history of each case.
        pages_root: what the paths of pages are relative to, where it is not the run's own root.

    Raises:
        OSError: where `out` cannot be written.
    """
    out.write_text(html(report_data(run, history, pages_root)), encoding="utf-8")
    return out


def answer(
    folder: Path,
    history: Sequence[Path] = (),
    out: Path | None = None,
    pages_root: Path | None = None,
) -> Answer:
    """Write the report of the run in `folder` and say where it is.

    Raises:
        Unanswerable: where a folder holds no run, or the report cannot be written.
    """
    run, before = Run.read(folder), [Run.read(one) for one in history]
    path = out or (run.folder or folder) / "report.html"
    try:
        write(run, path, before, pages_root)
    except OSError as error:
        raise Unanswerable(
            f"{path}: cannot be written ({error})\n"
            "Name a file that can:\n"
            f"    aisp report {folder} --out=report.html"
        ) from None
    return Answer([f"{path}: {len(run.cases)} cases, {path.stat().st_size / 1e6:.2f} MB"])


def html(data: Mapping[str, Any]) -> str:
    """Return the page that embeds `data`."""
    style, script = _part("style.css"), _script()
    axis = table.Axis.over(data["cases"])
    parts = {
        "policy": POLICY.format(style=_digest(style), script=_digest(script)),
        "title": escape(_title(data["run"])),
        "style": style,
        "grid": table.grid(axis),
        "heading": escape(str(data["run"].get("name") or "Unknown machine")),
        "lead": _lead(data["cases"]),
        "facts": "".join(_facts(data["run"])),
        "banner": "".join(_banner(data["run"])),
        "tally": _tally(data["cases"]),
        "axis": table.head(axis),
        "rows": table.rows(data["cases"], axis),
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


def _title(run: Mapping[str, Any]) -> str:
    return f"{run.get('product') or 'aisp'}, {_date(run)}".rstrip(", ")


def _date(run: Mapping[str, Any]) -> str:
    return str(run.get("started") or "")[:16].replace("T", " ")


def _facts(run: Mapping[str, Any]) -> list[str]:
    """Return what the run was taken with: labels and values."""
    versions = {k: v for k, v in run["versions"].items() if v}
    facts = {"product": run.get("product"), **versions}
    power, sm = run.get("power_limit_w"), run["clocks"].get("sm_max")
    facts["power limit"] = f"{power} W" if power else None
    facts["max SM clock"] = f"{sm} MHz" if sm else None
    facts["GPUs"] = run["gpus"] if run["gpus"] > 1 else None
    facts["commit"] = _commit(run)
    facts["taken"] = f"{_date(run)} UTC" if run.get("started") else None
    facts["mode"] = run.get("mode")
    return [
        f"<div><dt>{escape(k)}</dt><dd>{escape(str(v))}</dd></div>" for k, v in facts.items() if v
    ]


def _commit(run: Mapping[str, Any]) -> str | None:
    if not run.get("commit"):
        return None
    branch = f" ({run['branch']})" if run.get("branch") else ""
    return f"{str(run['commit'])[:10]}{branch}{', changed since' if run.get('dirty') else ''}"


def _lead(cases: Sequence[Mapping[str, Any]]) -> str:
    """Return in a sentence how it went."""
    timed, red = (sum(map(test, cases)) for test in (_is_timed, _is_red))
    words = "None is red." if not red else "1 is red." if red == 1 else f"{red} are red."
    return f"{timed} of {len(cases)} cases timed. {words}" if cases else "No case ran."


def _is_timed(case: Mapping[str, Any]) -> bool:
    return "speedup" in case


def _is_red(case: Mapping[str, Any]) -> bool:
    return case["verdict"] in RED


def _banner(run: Mapping[str, Any]) -> list[str]:
    """Return what must be known before any number is believed."""
    found = []
    if run["invalid"]:
        found.append(
            _notice("invalid", "This run is invalid: none of its verdicts counts.", run["invalid"])
        )
    if run.get("complete") is False:
        words = "This run did not end by itself: what it had finished is here."
        found.append(_notice("partial", words, [*run["lost"], *run["not_written"]]))
    elif run["lost"] or run["not_written"]:
        words = "Something of this run is missing."
        found.append(_notice("partial", words, [*run["lost"], *run["not_written"]]))
    if run["no_verdict"]:
        found.append(
            _notice("partial", "Cases without a verdict: their worker died.", run["no_verdict"])
        )
    return found


def _notice(kind: str, words: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<div class="notice {kind}" role="alert"><p>{words}</p><ul>{items}</ul></div>'


def _tally(cases: Sequence[Mapping[str, Any]]) -> str:
    """Return how many cases have which verdict, the gravest first; scripts make them filters."""
    counts = Counter(case["verdict"] for case in cases)
    return "".join(
        f'<button type="button" class="v-{verdict or "none"}" data-verdict="{verdict}" disabled>'
        f"{table.glyph(verdict or 'none')}<b>{counts[verdict]}</b> {verdict or 'no verdict'}</button>"
        for verdict in ORDER
        if counts[verdict]
    )
