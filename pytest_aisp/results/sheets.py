"""`results.md`, the table that people paste into a pull request, and `results.csv`, flat."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from .goals import GOALS
from .row import digits, duration, size_text
from .verdict import ORDER, RED

HEADS: tuple[str, ...] = ("verdict", "page", "case", "baseline", "optimized", "speedup [99 %]")
HEADS += ("limit", "claim", "stored", "why")

Case = Mapping[str, Any]


def markdown(plain: Mapping[str, Any]) -> str:
    """Return the table of what `results.json` holds."""
    run, cases = plain["run"], plain["cases"]
    lines = [f"**{_counted(cases)}** on {run['machine']['name']}, {_when(run)}", ""]
    lines += [f"**Invalid**: {_cell(why)}\n" for why in run["invalid"]]
    rows = [_row(case) for case in in_order(cases)]
    if rows:
        lines += table(HEADS, rows)
    return "\n".join(lines) + "\n"


def in_order(cases: Iterable[Case]) -> list[Case]:
    """Return the cases with the red ones first; within a verdict as they finished."""
    places = {verdict: place for place, verdict in enumerate(ORDER)}
    return sorted(cases, key=lambda case: places.get(case["verdict"], -1))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; whatever is in a cell stays in it."""
    every = [heads, ["---"] * len(heads), *([_cell(c) for c in row] for row in rows)]
    return ["| " + " | ".join(row) + " |" for row in every]


def _cell(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    return " ".join(escaped.split())


def _counted(cases: Iterable[Case]) -> str:
    counts: dict[str, int] = {}
    for case in in_order(cases):
        counts[case["verdict"]] = counts.get(case["verdict"], 0) + 1
    return ", ".join(f"{n} {verdict or 'without a verdict'}" for verdict, n in counts.items()) or (
        "no cases"
    )


def _when(run: Mapping[str, Any]) -> str:
    commit = (run["git"] or {}).get("commit")
    at = f" at {commit[:12]}" if commit else ""
    dirty = " with uncommitted changes" if at and run["git"]["dirty"] else ""
    killed = "" if run["complete"] else "; the run did not come to its end"
    return f"{run['started']}{at}{dirty}{killed}"


def _row(case: Case) -> tuple[str, ...]:
    times = case["seconds"]
    red = case["verdict"] in RED
    stored, claim, limit = case["stored"], case["claim"], case["limit"]
    why = case["reasons"] or ([case["not_timed"]] if case["not_timed"] else [])
    return (
        f"**{case['verdict']}**" if red else case["verdict"],
        PurePath(case["page"]).name.removesuffix("_test.py"),
        label(case),
        duration(times["baseline"]) if times else "",
        duration(times["optimized"]) if times else "",
        speed(case["speedup"]),
        f"{limit['share']:.0%} {limit['name']}" if limit else "",
        str(claim["at_least"]) if claim else "",
        times_text(stored["speedup"]) if stored else "",
        "; ".join(why),
    )


def label(case: Case) -> str:
    """Return ``tiled, n=4096``."""
    size = size_text(case.get("gpus", 1), case["size"])
    return f"{case['variant']}, {size}" if size else case["variant"]


def speed(speedup: Mapping[str, float] | None) -> str:
    """Return ``3.530x [3.510, 3.550]``, or nothing."""
    if speedup is None:
        return ""
    value, low, high = (times_text(speedup[k]) for k in ("value", "low", "high"))
    return f"{value} [{low[:-1]}, {high[:-1]}]"


def times_text(speedup: float) -> str:
    """Return ``3.530x``: three or four digits."""
    return f"{digits(speedup)}x"


COLUMNS: tuple[str, ...] = (
    "id",
    "page",
    "chapter",
    "function",
    "baseline",
    "variant",
    "size",
    "gpus",
    "product",
    "arch",
)
COLUMNS += ("bound", "clock", "verdict", "not_timed", "speedup", "low", "high", "baseline_s")
COLUMNS += ("optimized_s", "share", "limit", "claim", "stored", "spread", "detectable", "votes")
COLUMNS += tuple(f"{goal}_{side}" for goal in GOALS for side in ("baseline", "optimized"))
COLUMNS += ("reasons", "wall", "samples")


def csv_text(plain: Mapping[str, Any]) -> str:
    """Return a line a case, `COLUMNS` first; several values in a cell are separated by ``; ``."""
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_flat(case) for case in plain["cases"])
    return file.getvalue()


def _flat(case: Case) -> dict[str, Any]:
    flat = {name: case[name] for name in COLUMNS if isinstance(case.get(name), str | int | float)}
    speedup, times = case["speedup"] or {}, case["seconds"] or {}
    limit, goals = case["limit"] or {}, case["goals"]
    flat |= {"speedup": speedup.get("value"), "low": speedup.get("low")}
    flat |= {"high": speedup.get("high"), "baseline_s": times.get("baseline")}
    flat |= {"optimized_s": times.get("optimized"), "share": limit.get("share")}
    flat |= {"limit": limit.get("name"), "claim": (case["claim"] or {}).get("at_least")}
    flat |= {"stored": (case["stored"] or {}).get("speedup")}
    flat |= {
        f"{name}_{side}": goals.get(name, {}).get(side)
        for name in GOALS
        for side in ("baseline", "optimized")
    }
    flat |= {"size": "; ".join(f"{k}={v}" for k, v in case["size"].items())}
    flat |= {"votes": "; ".join(map(str, case["votes"])), "reasons": "; ".join(case["reasons"])}
    return flat | {"samples": (case["samples"] or {}).get("path")}
