"""Write `report.html`: one file that contains all data of a run and loads no other file.

The report is assembled from the files in the folder `page`. The table of cases is plain HTML and
needs no scripts. The scripts add filters, the roofline, and a page for each case.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from urllib.parse import quote

from ..results.artifacts import REPORT, publish
from ..results.results_json import GitState
from ..results.row import digits, duration
from ..results.verdict import DISTURBED, LOOK, RED
from ..util.cli_result import CliError, CliResult
from .data import ReportData, report_data
from .history_data import read_history
from .run import VERDICTS, ReportCase, ReportRun, read_hierarchy

PARTS = Path(__file__).parent / "page"
SCRIPTS = ["dom", "marks", "list", "axis", "curves", "roofline", "samples", "interval", "code"]
SCRIPTS += ["errors", "hierarchy", "timeline", "case", "main"]
"""The scripts in the order in which they must run. Scripts use definitions of earlier scripts."""
POLICY = "default-src 'none'; img-src data:; style-src {style}; script-src {script}"
"""The content security policy. Under this policy, browsers load no other file and run only the
report's own script, even if the name of a case contains HTML.
"""
COARSE, FINE = (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)
"""The ticks within one decade of the axis."""
MIDDLE = 12
"""Half the height of a row's plot, in pixels."""
PACKAGES = ("torch", "triton", "transformer-engine")


def write_report(
    run: ReportRun, out: Path, history: Sequence[ReportRun] = (), pages_root: Path | None = None
) -> Path:
    """Write the report of `run` to `out` and return `out`.

    Args:
        history: other runs, which are shown in the history of each case.
        pages_root: the folder that the pages' paths are relative to. The default is the root of the
            run.

    Raises:
        OSError: if `out` cannot be written.
    """
    data = report_data(run, history, pages_root, out.absolute().parent)
    out.write_text(render(run, data), encoding="utf-8")
    return out


def report_result(
    folder: Path,
    history: Sequence[Path] = (),
    out: Path | None = None,
    pages_root: Path | None = None,
    hierarchy: Path | None = None,
) -> CliResult:
    """Write the report of the run in `folder`, and return its path as output.

    Raises:
        CliError: if an input cannot be read, or the report cannot be written.
    """
    run, (others, past) = ReportRun.read(folder), read_history(history)
    run = replace(run, past=past, hierarchy=read_hierarchy(hierarchy) if hierarchy else None)
    path = out or (run.folder or folder) / REPORT
    try:
        if run.killed is not None:
            publish(run.killed)
        write_report(run, path, others, pages_root)
    except OSError as error:
        raise CliError(
            f"{path}: cannot be written ({error})\n"
            "Name a file that can be written:\n"
            f"    aisp results report {folder} --out=report.html"
        ) from None
    return CliResult([f"{path}: {len(run.cases)} cases, {path.stat().st_size / 1e6:.2f} MB"])


def render(run: ReportRun, data: ReportData) -> str:
    """Return the report as HTML."""
    style, script, axis = _part("style.css"), _script(), Axis.over(data.cases)
    parts = {
        "policy": POLICY.format(style=_digest(style), script=_digest(script)),
        "title": escape(f"{run.manifest.machine.product or 'aisp'}, {_date(run)}".rstrip(", ")),
        "style": style,
        "grid": _grid(axis),
        "heading": escape(run.manifest.machine.name or "Unknown machine"),
        "lead": _lead(data.cases),
        "facts": _facts(run),
        "banner": _banner(run),
        "tally": _tally(data.cases),
        "axis": _axis_labels(axis),
        "rows": "\n".join(_row(index, case, axis) for index, case in enumerate(data.cases)),
        # `</script>` in the data must not end the element
        "data": data.json().replace("<", "\\u003c"),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _part("page.html"))


def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")


def _script() -> str:
    """Return all scripts combined into one that defines no global names."""
    body = "\n".join(_part(f"{name}.js") for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{body}\n}})();\n'


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@dataclass(frozen=True)
class Axis:
    """The logarithmic axis of speedups that all rows share."""

    low: float
    high: float

    @classmethod
    def over(cls, cases: Iterable[ReportCase]) -> Axis:
        """Return an axis that includes 1x and every interval, claim and stored result."""
        values = [1.0, *(value for case in cases for value in _plotted(case))]
        low, high = min(values), max(values)
        margin = max(high / low, 1.2) ** 0.04
        return cls(low / margin, high * margin)

    def at(self, value: float) -> str:
        """Return the position of `value` as a percentage of the width."""
        part = math.log(value / self.low) / math.log(self.high / self.low)
        return f"{100 * part:.2f}%"

    def ticks(self) -> list[float]:
        """Return round speedups on the axis, including 1x, far enough apart for their labels."""
        decades = math.log10(self.high / self.low)
        if decades < 0.35:  # for less than a factor of about two, use linear steps
            step = 0.1 if decades > 0.08 else 0.02
            first, last = math.ceil(self.low / step), math.floor(self.high / step)
            return [round(n * step, 4) for n in range(first, last + 1)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        steps = FINE if decades < 0.8 else COARSE if decades < 2.2 else (1,)
        ticks = [step * 10.0**power for power in powers for step in steps]
        return [tick for tick in ticks if self.low < tick < self.high]


def _axis_labels(axis: Axis) -> str:
    labels = "".join(
        f'<text x="{axis.at(t)}" y="14" text-anchor="middle">{t:g}×</text>' for t in axis.ticks()
    )
    return f'<svg class="axis" aria-hidden="true">{labels}</svg>'


def _grid(axis: Axis) -> str:
    """Return the grid lines that are drawn behind every plot, as an SVG definition."""
    lines = (
        f'<line class="{"one" if t == 1 else ""}" x1="{axis.at(t)}" x2="{axis.at(t)}"'
        f' y1="0" y2="100%"/>'
        for t in axis.ticks()
    )
    return f'<g id="grid">{"".join(lines)}</g>'


def _row(index: int, case: ReportCase, axis: Axis) -> str:
    verdict, plot = case.verdict or "none", _plot(case, axis)
    if case.verdict in LOOK and case.reasons:  # the page of the case shows all reasons
        cause = f"{case.cause}: " if case.cause else ""
        plot += f'<div class="why">{escape(cause + case.reasons[0])}</div>'
    cells = [
        f'<td class="verdict">{_glyph(verdict)}{verdict}</td>',
        f'<td class="case">{_name(case)}</td>',
        f'<td class="plot">{plot}</td>',
        f'<td class="number">{_speedup(case)}</td>',
        f'<td class="times">{_times(case)}</td>',
        f'<td class="limit">{_limit(case)}</td>',
        f'<td class="bound">{escape(case.bound)}</td>',
    ]
    return f'<tr data-i="{index}" class="v-{verdict}">{"".join(cells)}</tr>'


def _glyph(verdict: str) -> str:
    """Return a symbol for the verdict. Every verdict has its own shape and its own color."""
    return f'<svg class="glyph" aria-hidden="true"><use href="#v-{verdict}" x="8" y="8"/></svg>'


def _name(case: ReportCase) -> str:
    stem = case.page.rpartition("/")[2].removesuffix(".py").removesuffix("_test")
    function = case.function.removeprefix("test_")
    page = f"{case.chapter} / {stem}"
    if function and function != stem:
        page += f" · {function}"
    ranks = [f"{case.gpus} GPUs"] if case.gpus > 1 else []
    size = " · ".join([*ranks, *(f"{key} {value}" for key, value in case.size.items())])
    address = f"#case/{quote(case.id, safe='')}"
    return (
        f'<a href="{escape(address)}">{escape(case.variant or case.id)}</a>'
        f' <span class="page">{escape(page)}</span> <span class="size">{escape(size)}</span>'
    )


def _plotted(case: ReportCase) -> list[float]:
    """Return the speedups in a row's plot, or none if the case was not timed."""
    if case.speedup is None:
        return []
    marks = [case.claimed_speedup, case.stored.speedup if case.stored else None]
    interval = [case.speedup.value, case.speedup.low, case.speedup.high]
    return [*interval, *(mark for mark in marks if mark)]


def _plot(case: ReportCase, axis: Axis) -> str:
    speedup, y = case.speedup, MIDDLE
    if speedup is None:
        return f'<span class="need">{escape(case.not_timed)}</span>'
    parts = ['<use href="#grid"/>']
    words = f"{_ratio(speedup.value)}, 99 % interval"
    words += f" {_ratio(speedup.low)} to {_ratio(speedup.high)}"
    if claim := case.claimed_speedup:
        x = axis.at(claim)
        parts.append(f'<line class="claim" x1="{x}" x2="{x}" y1="1" y2="{y - 4}"/>')
        words += f", claim {_ratio(claim)}"
    if case.stored:
        x = axis.at(case.stored.speedup)
        parts.append(f'<line class="stored" x1="{x}" x2="{x}" y1="{y + 4}" y2="{2 * y - 1}"/>')
        words += f", stored {_ratio(case.stored.speedup)}"
    ends = f'x1="{axis.at(speedup.low)}" x2="{axis.at(speedup.high)}"'
    parts.append(f'<line class="interval" {ends} y1="{y}" y2="{y}"/>')
    mark = f'x="{axis.at(speedup.value)}" y="{y}"'
    parts.append(f'<use href="#v-{case.verdict or "none"}" {mark}/>')
    return f'<svg role="img" aria-label="{escape(words)}">{"".join(parts)}</svg>'


def _ratio(speedup: float) -> str:
    """Return a speedup such as ``3.530×``, with the same number of digits as in the terminal."""
    return f"{digits(speedup)}×"


def _speedup(case: ReportCase) -> str:
    if case.speedup is None:
        return ""
    low, high = digits(case.speedup.low), digits(case.speedup.high)
    return f"<b>{_ratio(case.speedup.value)}</b> <small>{low} – {high}</small>"


def _times(case: ReportCase) -> str:
    if case.seconds is None:
        return ""
    sides = (case.seconds.baseline, case.seconds.optimized)
    baseline, optimized = (duration(s).replace("us", "µs") for s in sides)
    return f"{baseline} <i>→</i> {optimized}"


def _limit(case: ReportCase) -> str:
    if case.limit is None:
        return ""
    return f"{100 * case.limit.share:.0f} % <small>{escape(case.limit.name)}</small>"


def _date(run: ReportRun) -> str:
    return run.manifest.started[:16].replace("T", " ")


def _facts(run: ReportRun) -> str:
    """Return the machine, the versions and the commit of the run as labels and values."""
    manifest, machine = run.manifest, run.manifest.machine
    power, sm = machine.facts.get("power_limit_w"), machine.clocks.get("sm_max")
    facts: dict[str, object] = {"product": machine.product, "simulated by": manifest.timer}
    facts |= {name: machine.versions.get(name) for name in ("driver", "cuda")}
    facts |= {name: manifest.packages.get(name) for name in PACKAGES}
    facts["power limit"] = power and f"{power} W"
    facts["max SM clock"] = sm and f"{sm} MHz"
    facts["GPUs"] = len(machine.gpus) if len(machine.gpus) > 1 else None
    facts["commit"] = _commit(manifest.git)
    facts["started"] = manifest.started and f"{_date(run)} UTC"
    facts["mode"] = manifest.mode
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in facts.items()
        if value
    )


def _commit(git: GitState | None) -> str:
    if git is None or not git.commit:
        return ""
    branch = f" ({git.branch})" if git.branch else ""
    return f"{git.commit[:10]}{branch}{', changed since' if git.dirty else ''}"


def _lead(cases: Sequence[ReportCase]) -> str:
    """Return one sentence that summarizes the result of the run."""
    if not cases:
        return "No case ran."
    timed = sum(case.speedup is not None for case in cases)
    red = sum(case.verdict in RED for case in cases)
    return f"{timed} of {len(cases)} cases timed. {red or 'None'} {'is' if red < 2 else 'are'} red."


def _banner(run: ReportRun) -> str:
    """Return the warnings about the whole run, which come before all numbers."""
    manifest = run.manifest
    missing = [*run.lost, *manifest.not_written]
    html = ""
    if manifest.invalid:
        text = "This run is invalid: none of its verdicts counts."
        html += _notice("invalid", text, manifest.invalid)
    if not manifest.complete:
        text = "This run was interrupted. The report shows the cases that had finished."
        html += _notice("partial", text, missing)
    elif missing:
        html += _notice("partial", "Parts of this run are missing.", missing)
    if manifest.no_verdict:
        text = "Cases without a verdict: their worker died."
        html += _notice("partial", text, manifest.no_verdict)
    if disturbed := [c for c in run.cases if c.verdict == DISTURBED]:
        text = "Cases without a verdict: something else used the machine."
        lines = [f"{c.function}[{c.variant}]: {'; '.join(c.reasons)}" for c in disturbed]
        html += _notice("partial", text, lines)
    if manifest.no_canary:
        text = "Verdicts without a canary: their worker ended before it ran one."
        html += _notice("partial", text, manifest.no_canary)
    return html


def _notice(kind: str, text: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<div class="notice {kind}" role="alert"><p>{text}</p><ul>{items}</ul></div>'


def _tally(cases: Sequence[ReportCase]) -> str:
    """Return the number of cases by verdict, the worst first. Each number becomes a filter."""
    counts = Counter(case.verdict for case in cases)
    return "".join(
        f'<button type="button" class="v-{verdict or "none"}" data-verdict="{verdict}" disabled>'
        f"{_glyph(verdict or 'none')}<b>{counts[verdict]}</b> {verdict or 'no verdict'}</button>"
        for verdict in VERDICTS
        if counts[verdict]
    )
