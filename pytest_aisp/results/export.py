"""`results.json`: what a run's journal says, in the shape that others may rely on.

The shape is that of `results-1.schema.json` beside this module. Within version 1 fields may be
added; those that are there keep their names and meanings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from .goals import GOALS

SCHEMA = 1
"""Version of `results.json`, of the manifest, and of the journal's lines."""
SAMPLES = ("checks", "timings", "against")
"""What of a row is the bench process's full answers, and lies in a file of its own."""


def schema() -> dict[str, Any]:
    """Return the JSON Schema of `results.json`."""
    text = Path(__file__).with_name(f"results-{SCHEMA}.schema.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def case(line: Mapping[str, Any], root: str) -> dict[str, Any]:
    """Return a journal's line as a case of `results.json`; paths below `root` without it."""
    return {
        "id": line["nodeid"],
        "key": line["key"],
        "page": below(line["page"], root),
        "chapter": PurePath(line["file"]).stem,
        "function": line["function"],
        "baseline": line["baseline"],
        "variant": line["variant"],
        "size": line["size"],
        "gpus": line.get("gpus", 1),
        "product": line["product"],
        "arch": line["arch"],
        "bound": line["bound"],
        "clock": line["clock"],
        "verdict": line["verdict"],
        "not_timed": line["need"],
        **_numbers(line),
        **_limits(line),
        "goals": _goals(line),
        "profile": _profile(line["profile"]),
        **{name: line[name] for name in ("reasons", "notes", "remarks", "launch_bound")},
        **{name: line[name] for name in ("environment", "sources", "wall", "samples")},
    }


def _numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was measured: speedups where the journal holds their logarithms."""
    ends = [line[name] for name in ("value", "low", "high")]
    value, low, high = (None if end is None else math.exp(end) for end in ends)
    timed = None not in ends
    lost = line["detectable"]
    times = list(line["seconds"].values())
    return {
        "speedup": {"value": value, "low": low, "high": high} if timed else None,
        "seconds": {"baseline": times[0], "optimized": times[-1]} if times else None,
        "work": line["work"],
        "spread": line["spread"],
        "session": line["session"],
        "detectable": None if lost is None else 1 - math.exp(-lost),
        "suspect": line["suspect"],
        "votes": [math.exp(vote) for vote in line["votes"]],
        "trials": [{"speedup": math.exp(v), "verdict": word} for v, word in line["trials"]],
    }


def _limits(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the case was held against, each with the place where it is written."""
    origins, stored = line["origins"], line["stored"]
    found: dict[str, Any] = {"limit": None, "claim": None, "stored": None}
    if line["share"] is not None and math.isfinite(line["share"]):
        share = {"name": line["limit"], "share": line["share"]}
        found["limit"] = {**share, "from": origins.get("limit", "")}
    if line["claim"] is not None:
        found["claim"] = {"at_least": line["claim"], "from": origins.get("claim", "")}
    if stored is not None:
        found["stored"] = {"speedup": math.exp(stored), "from": origins.get("stored", "")}
    return found


def _goals(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was counted, with the page's limit and with what is red beside the stored one."""
    found = {}
    for name, both in line["goals"].items():
        held = {"limit": line["limits"].get(name), "stored": line["held"].get(name)}
        margin = {"margin": GOALS[name].margin, "slack": GOALS[name].slack}
        found[name] = {**both, **held, **margin}
    return found


def _profile(found: Mapping[str, Any]) -> dict[str, Any] | None:
    if not found:
        return None
    where = PurePath(found["folder"])
    names = [name for files in found.get("files", {}).values() for name in files]
    files = [str(where / name) for name in names]
    return {"tool": found["tool"], "folder": str(where), "files": files}


def below(path: str, folder: str) -> str:
    """Return `path` relative to `folder` where it lies below it, else as it is."""
    inside = folder and PurePath(path).is_relative_to(folder)
    return str(PurePath(path).relative_to(folder)) if inside else path
