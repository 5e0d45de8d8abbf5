"""`results.json`: what a run's journal says, in the shape that others may rely on.

The shape is that of `results-1.schema.json` beside this module. Within version 1 fields may be
added; those that are there keep their names and meanings.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from msgspec.structs import asdict

from .metric_limits import METRICS
from .row import JournalLine, Profile, digits, duration, size_text
from .verdict import ORDER, RED

SCHEMA = 1
"""Version of `results.json`, of the manifest, and of the journal's lines."""


def schema() -> dict[str, Any]:
    """Return the JSON Schema of `results.json`."""
    text = Path(__file__).with_name(f"results-{SCHEMA}.schema.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def case(line: JournalLine, root: str) -> dict[str, Any]:
    """Return a journal's line as a case of `results.json`; paths below `root` without it."""
    return {
        "id": line.nodeid,
        "key": line.key,
        "page": path_below(line.page, root),
        "chapter": PurePath(line.file).stem,
        "function": line.function,
        "baseline": line.baseline,
        "variant": line.variant,
        "size": line.size,
        "gpus": line.gpus,
        "product": line.product,
        "arch": line.arch,
        "bound": line.bound,
        "clock": line.clock,
        "verdict": line.verdict,
        "not_timed": line.need,
        **_numbers(line),
        **_limits(line),
        "goals": _goals(line),
        "profile": _profile(line.profile),
        **{name: getattr(line, name) for name in ("reasons", "notes", "remarks", "launch_bound")},
        **{name: getattr(line, name) for name in ("environment", "sources", "wall")},
        "samples": None if line.samples is None else asdict(line.samples),
    }


def _numbers(line: JournalLine) -> dict[str, Any]:
    """Return what was measured: speedups where the journal holds their logarithms."""
    value, low, high = (
        None if end is None else math.exp(end) for end in (line.value, line.low, line.high)
    )
    timed = None not in (value, low, high)
    lost = line.detectable
    times = list(line.seconds.values())
    return {
        "speedup": {"value": value, "low": low, "high": high} if timed else None,
        "seconds": {"baseline": times[0], "optimized": times[-1]} if times else None,
        "work": line.work,
        "spread": line.spread,
        "session": line.session,
        "detectable": None if lost is None else 1 - math.exp(-lost),
        "suspect": line.suspect,
        "votes": [math.exp(vote) for vote in line.votes],
        "trials": [{"speedup": math.exp(v), "verdict": word} for v, word in line.trials],
    }


def _limits(line: JournalLine) -> dict[str, Any]:
    """Return what the case was held against, each with the place where it is written."""
    origins, stored = line.origins, line.stored
    found: dict[str, Any] = {"limit": None, "claim": None, "stored": None}
    if line.share is not None and math.isfinite(line.share):
        share = {"name": line.limit, "share": line.share}
        found["limit"] = {**share, "from": origins.get("limit", "")}
    if line.claim is not None:
        found["claim"] = {"at_least": line.claim, "from": origins.get("claim", "")}
    if stored is not None:
        found["stored"] = {"speedup": math.exp(stored), "from": origins.get("stored", "")}
    return found


def _goals(line: JournalLine) -> dict[str, Any]:
    """Return what was counted, with the page's limit and with what is red beside the stored one."""
    found = {}
    for name, both in line.goals.items():
        held = {"limit": line.limits.get(name), "stored": line.held.get(name)}
        margin = {"margin": METRICS[name].margin, "slack": METRICS[name].slack}
        found[name] = {**both, **held, **margin}
    return found


def _profile(profile: Profile) -> dict[str, Any] | None:
    if not profile:
        return None
    where = PurePath(profile.folder)
    files = [str(where / name) for names in profile.files.values() for name in names]
    return {"tool": profile.tool, "folder": str(where), "files": files}


def path_below(path: str, folder: str) -> str:
    """Return `path` relative to `folder` where it lies below it, else as it is."""
    inside = folder and PurePath(path).is_relative_to(folder)
    return str(PurePath(path).relative_to(folder)) if inside else path


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
COLUMNS += tuple(f"{goal}_{side}" for goal in METRICS for side in ("baseline", "optimized"))
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
        for name in METRICS
        for side in ("baseline", "optimized")
    }
    flat |= {"size": "; ".join(f"{k}={v}" for k, v in case["size"].items())}
    flat |= {"votes": "; ".join(map(str, case["votes"])), "reasons": "; ".join(case["reasons"])}
    return flat | {"samples": (case["samples"] or {}).get("path")}
