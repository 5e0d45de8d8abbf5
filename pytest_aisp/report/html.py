"""The report's table of cases, as HTML that needs no script: verdict, interval plot, numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any
from urllib.parse import quote

from ..results.row import digits, duration
from ..results.verdict import LOOK, RED
from .data import ORDER

STEPS, FINE = (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)
MIDDLE = 12
"""Half the height of a row's plot, in pixels."""


@dataclass(frozen=True)
class Axis:
    """The logarithmic axis of speedups that all rows share."""

    low: float
    high: float

    @classmethod
    def over(cls, cases: Iterable[Mapping[str, Any]]) -> Axis:
        """Return an axis with room for every interval, claim and stored result, and for 1x."""
        seen = [1.0, *(v for case in cases for v in _seen(case))]
        low, high = min(seen), max(seen)
        margin = max(high / low, 1.2) ** 0.04
        return cls(low / margin, high * margin)

    def at(self, value: float) -> str:
        """Return where `value` lies, as a percentage of the width."""
        part = math.log(value / self.low) / math.log(self.high / self.low)
        return f"{100 * part:.2f}%"

    def ticks(self) -> list[float]:
        """Return round speedups in reach, 1x among them, few enough to stand beside each other."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        wide = math.log10(self.high / self.low)
        within = FINE if wide < 0.8 else STEPS
        fine = [s * 10.0**p for p in powers for s in within if self.low < s * 10.0**p < self.high]
        if wide < 0.35:  # all within a factor of two: steps of a tenth, or of a hundredth
            step = 0.1 if wide > 0.08 else 0.02
            first, last = math.ceil(self.low / step), math.floor(self.high / step)
            return [round(n * step, 4) for n in range(first, last + 1)]
        return [t for t in fine if wide < 2.2 or f"{t:e}"[0] == "1"]


def head(axis: Axis) -> str:
    """Return the axis above the plots."""
    words = "".join(
        f'<text x="{axis.at(t)}" y="14" text-anchor="middle">{t:g}×</text>' for t in axis.ticks()
    )
    return f'<svg class="axis" aria-hidden="true">{words}</svg>'


def grid(axis: Axis) -> str:
    """Return the lines behind every plot, for the page's definitions."""
    lines = (
        f'<line class="{"one" if t == 1 else ""}" x1="{axis.at(t)}" x2="{axis.at(t)}"'
        f' y1="0" y2="100%"/>'
        for t in axis.ticks()
    )
    return f'<g id="grid">{"".join(lines)}</g>'


def rows(cases: Sequence[Mapping[str, Any]], axis: Axis) -> str:
    """Return a table row a case."""
    return "\n".join(_row(index, case, axis) for index, case in enumerate(cases))


def _row(index: int, case: Mapping[str, Any], axis: Axis) -> str:
    verdict = case["verdict"] or "none"
    cells = [
        f'<td class="verdict">{glyph(verdict)}{verdict}</td>',
        f'<td class="case">{"".join(_name(case))}</td>',
        f'<td class="plot">{_plot(case, axis)}{_why(case)}</td>',
        f'<td class="number">{_speedup(case)}</td>',
        f'<td class="times">{_times(case)}</td>',
        f'<td class="limit">{_limit(case)}</td>',
        f'<td class="bound">{escape(case["bound"])}</td>',
    ]
    return f'<tr data-i="{index}" class="v-{verdict}">{"".join(cells)}</tr>'


def glyph(verdict: str) -> str:
    """Return the shape of a verdict, which says the same as its colour."""
    return f'<svg class="glyph" aria-hidden="true"><use href="#v-{verdict}" x="8" y="8"/></svg>'


def anchor(case: Mapping[str, Any]) -> str:
    """Return the part of the address that opens a case."""
    return f"#case/{quote(case['id'], safe='')}"


def page_name(case: Mapping[str, Any]) -> str:
    """Return ``ch07 / transpose``, with the test where a page has several names for it."""
    stem = case["page"].rpartition("/")[2].removesuffix(".py").removesuffix("_test")
    function = case["function"].removeprefix("test_")
    more = f" · {function}" if function and function != stem else ""
    return f"{case['chapter']} / {stem}{more}"


def size_words(case: Mapping[str, Any]) -> str:
    """Return ``rows 2048 · n 65536``."""
    ranks = [f"{case['gpus']} GPUs"] if case.get("gpus", 1) > 1 else []
    return " · ".join([*ranks, *(f"{k} {v}" for k, v in case.get("size", {}).items())])


def _name(case: Mapping[str, Any]) -> Iterator[str]:
    name = case["variant"] or case["id"]
    yield f'<a href="{escape(anchor(case))}">{escape(name)}</a>'
    yield f' <span class="page">{escape(page_name(case))}</span>'
    yield f' <span class="size">{escape(size_words(case))}</span>'


def _why(case: Mapping[str, Any]) -> str:
    """Return the first reason of a case that needs a look; its page has all of them."""
    if case["verdict"] not in LOOK or not case.get("reasons"):
        return ""
    return f'<div class="why">{escape(str(case["reasons"][0]))}</div>'


def _plot(case: Mapping[str, Any], axis: Axis) -> str:
    if "speedup" not in case:
        return f'<span class="need">{escape(case["not_timed"])}</span>'
    value, low, high = case["speedup"]
    y = MIDDLE
    parts = ['<use href="#grid"/>']
    if claim := claimed(case):
        parts.append(_tick("claim", axis.at(claim), 1, y - 4))
    if stored := _stored(case):
        parts.append(_tick("stored", axis.at(stored), y + 4, 2 * y - 1))
    ends = f'x1="{axis.at(low)}" x2="{axis.at(high)}"'
    parts.append(f'<line class="interval" {ends} y1="{y}" y2="{y}"/>')
    parts.append(f'<use href="#v-{case["verdict"] or "none"}" x="{axis.at(value)}" y="{y}"/>')
    return f'<svg role="img" aria-label="{escape(_words(case))}">{"".join(parts)}</svg>'


def _tick(kind: str, x: str, top: float, bottom: float) -> str:
    return f'<line class="{kind}" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>'


def _words(case: Mapping[str, Any]) -> str:
    value, low, high = (text(v) for v in case["speedup"])
    said = f"{value}, 99 % interval {low} to {high}"
    said += f", claim {text(claim)}" if (claim := claimed(case)) else ""
    return said + (f", stored {text(stored)}" if (stored := _stored(case)) else "")


def claimed(case: Mapping[str, Any]) -> float | None:
    """Return the speedup that a page claims, 1 for `neutral`; a yardstick claims nothing."""
    told = case.get("claim")
    claim = told.get("at_least") if isinstance(told, Mapping) else None
    if claim == "neutral":
        return 1.0
    return float(claim) if isinstance(claim, (int, float)) and claim > 0 else None


def _stored(case: Mapping[str, Any]) -> float | None:
    told = case.get("stored")
    stored = told.get("speedup") if isinstance(told, Mapping) else None
    return float(stored) if isinstance(stored, (int, float)) and stored > 0 else None


def _seen(case: Mapping[str, Any]) -> list[float]:
    """Return what a row's plot shows; nothing where the case was not timed."""
    if "speedup" not in case:
        return []
    return [*case["speedup"], *(v for v in (claimed(case), _stored(case)) if v)]


def _speedup(case: Mapping[str, Any]) -> str:
    if "speedup" not in case:
        return ""
    value, low, high = case["speedup"]
    return f"<b>{text(value)}</b> <small>{text(low)[:-1]} – {text(high)[:-1]}</small>"


def text(speedup: float) -> str:
    """Return ``3.530×``, as the terminal writes it."""
    return f"{digits(speedup)}×"


def _times(case: Mapping[str, Any]) -> str:
    if "seconds" not in case:
        return ""
    baseline, optimized = (duration(s).replace("us", "µs") for s in case["seconds"])
    return f"{baseline} <i>→</i> {optimized}"


def _limit(case: Mapping[str, Any]) -> str:
    told = case.get("limit")
    share = told.get("share") if isinstance(told, Mapping) else None
    if not isinstance(told, Mapping) or not isinstance(share, (int, float)):
        return ""
    return f"{share:.0%} <small>{escape(str(told.get('name', '')))}</small>".replace("%", " %", 1)


def title(run: Mapping[str, Any]) -> str:
    """Return the name of the browser's tab."""
    return f"{run.get('product') or 'aisp'}, {_date(run)}".rstrip(", ")


def _date(run: Mapping[str, Any]) -> str:
    return str(run.get("started") or "")[:16].replace("T", " ")


def facts(run: Mapping[str, Any]) -> str:
    """Return what the run was taken with: labels and values."""
    versions = {k: v for k, v in run["versions"].items() if v}
    known = {"product": run.get("product"), **versions}
    power, sm = run.get("power_limit_w"), run["clocks"].get("sm_max")
    known["power limit"] = f"{power} W" if power else None
    known["max SM clock"] = f"{sm} MHz" if sm else None
    known["GPUs"] = run["gpus"] if run["gpus"] > 1 else None
    known["commit"] = _commit(run)
    known["taken"] = f"{_date(run)} UTC" if run.get("started") else None
    known["mode"] = run.get("mode")
    return "".join(
        f"<div><dt>{escape(k)}</dt><dd>{escape(str(v))}</dd></div>" for k, v in known.items() if v
    )


def _commit(run: Mapping[str, Any]) -> str | None:
    if not run.get("commit"):
        return None
    branch = f" ({run['branch']})" if run.get("branch") else ""
    return f"{str(run['commit'])[:10]}{branch}{', changed since' if run.get('dirty') else ''}"


def lead(cases: Sequence[Mapping[str, Any]]) -> str:
    """Return in a sentence how it went."""
    timed, red = (sum(map(test, cases)) for test in (_is_timed, _is_red))
    words = "None is red." if not red else "1 is red." if red == 1 else f"{red} are red."
    return f"{timed} of {len(cases)} cases timed. {words}" if cases else "No case ran."


def _is_timed(case: Mapping[str, Any]) -> bool:
    return "speedup" in case


def _is_red(case: Mapping[str, Any]) -> bool:
    return case["verdict"] in RED


def banner(run: Mapping[str, Any]) -> str:
    """Return what must be known before any number is believed."""
    lacking = [*run["lost"], *run["not_written"]]
    found = []
    if run["invalid"]:
        words = "This run is invalid: none of its verdicts counts."
        found.append(_notice("invalid", words, run["invalid"]))
    if run.get("complete") is False:
        words = "This run did not end by itself: what it had finished is here."
        found.append(_notice("partial", words, lacking))
    elif lacking:
        found.append(_notice("partial", "Something of this run is missing.", lacking))
    if run["no_verdict"]:
        words = "Cases without a verdict: their worker died."
        found.append(_notice("partial", words, run["no_verdict"]))
    if run["no_canary"]:
        words = "Verdicts without a canary: their worker ended before its own."
        found.append(_notice("partial", words, run["no_canary"]))
    return "".join(found)


def _notice(kind: str, words: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<div class="notice {kind}" role="alert"><p>{words}</p><ul>{items}</ul></div>'


def tally(cases: Sequence[Mapping[str, Any]]) -> str:
    """Return how many cases have which verdict, the gravest first; scripts make them filters."""
    counts = Counter(case["verdict"] for case in cases)
    return "".join(
        f'<button type="button" class="v-{verdict or "none"}" data-verdict="{verdict}" disabled>'
        f"{glyph(verdict or 'none')}<b>{counts[verdict]}</b> {verdict or 'no verdict'}</button>"
        for verdict in ORDER
        if counts[verdict]
    )
