"""The head of a report, as HTML: the machine, how it went, what to know before believing it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ..results.verdict import RED
from .data import ORDER
from .table import glyph


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
