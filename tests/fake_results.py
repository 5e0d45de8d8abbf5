"""Made-up catalogs, rows, stored results and artifacts."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from pytest_aisp.page.gpu_specs import ARCHS
from pytest_aisp.results import store
from pytest_aisp.results.artifacts import Artifacts
from pytest_aisp.results.models import Result
from pytest_aisp.results.results_json import Canary, MachineFacts, Manifest
from pytest_aisp.results.row import Row
from pytest_aisp.tools.catalog import Catalog

FACTS = {"driver": "580.65", "cuda": "13.0", "torch": "2.11.0", "triton": "3.6.0"}
SOURCES = {"baseline": "0a", "optimized": "1b"}


def page(name: str) -> dict[str, str]:
    """Return the page of a target."""
    chapter, _, stem = name.partition(":")
    return {"path": f"suites/{chapter}/{stem}_test.py", "chapter": chapter, "name": name}


def case(name: str, variant: str = "tiled", claim: float | str = 1.5, **fields: object) -> dict:
    """Return a case of the page `name` as the collector writes it."""
    stem = name.partition(":")[2]
    key = f"{stem}_test.py::test_{stem}[{variant}-n64]"
    plain = {
        **page(name),
        "title": f"About {stem}.",
        "nodeid": f"suites/{name.partition(':')[0]}/{key}",
        "key": key,
        "function": f"test_{stem}",
        "variant": variant,
        "size": {"n": 64},
        "kind": "gpu",
        "gpus": 1,
        "bound": "dram",
        "needs": [],
        "archs": ["sm90", "sm100"],
        "claims": dict.fromkeys(ARCHS, claim),
        "work": {"read": 2e9, "write": 2e9, "flops": {}, "wire": 0, "terms": 1, "roundings": 1},
        "sources": dict(SOURCES),
    }
    return {**plain, **fields}


def row(case: dict, verdict: str = "pass", **fields: object) -> dict:
    """Return the row of a case that was timed on an H200, as a run leaves it."""
    known = {name: case[name] for name in ("nodeid", "key", "function", "variant", "size", "bound")}
    timing = {"baseline": [2e-3, 2.1e-3], "optimized": [1e-3, 1.1e-3]}
    plain = Row(
        **known,
        file=f"baselines/nvidia-h200/{case['chapter']}.json",
        page=case["path"],
        product="nvidia-h200",
        verdict=verdict,
        clock="graph",
        seconds={"naive": 2e-3, case["variant"]: 1e-3},
        value=math.log(2.0),
        low=math.log(1.9),
        high=math.log(2.1),
        timings=[timing],
    )
    return {**plain.to_json(), **fields}


def fake_catalog(root: Path, cases: list[dict], **fields: object) -> Catalog:
    """Return the catalog of `cases`, with stored results in `root`/baselines."""
    pages = list({c["name"]: page(c["name"]) for c in cases}.values())
    plain = {"folders": ["suites"], "pages": pages, "cases": cases, "unread": []}
    places = {"root": root, "baselines": root / "baselines"}
    return msgspec.convert({**places, **plain, **fields}, Catalog)


def result(speedup: float, **fields: object) -> Result:
    """Return a result of two sessions of four processes; `fields` are those of `Result`."""
    value = math.log(speedup)
    four = (value - 1e-4, value + 1e-4, value - 1e-4, value + 1e-4)
    plain = {
        "baseline_us": 1000.0,
        "optimized_us": 1000.0 / speedup,
        "clock": "graph",
        "values": (four, four),
        "environments": ("one", "two"),
        "sources": SOURCES,
    }
    return Result(**{**plain, **fields})


def stored(root: Path, results: dict[str, Result], product="nvidia-h200", chapter="ch07"):
    """Store `results` by key; return the file."""
    path = root / "baselines" / product / f"{chapter}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {name: {**FACTS, "date": name} for name in ("one", "two")}
    store.write(path, product, results, facts, replace=True)
    return path


def artifacts(
    folder: Path,
    rows: list[dict],
    canaries: list[dict] = (),
    code: int | None = 0,
    **manifest: object,
):
    """Write the folder of a run. Without an exit code, the run was killed."""
    left = Artifacts(folder)
    machine = MachineFacts(name="a GPU", product="nvidia-h200", arch="sm90", gpus=["GPU-0"])
    plain = {
        "root": str(folder.parent),
        "started": "2026-11-22T07:52:10+00:00",
        "git": None,
        "machine": machine,
        "peaks": {},
        "complete": False,
        "invalid": [],
    }
    left.start(Manifest(**{**plain, **manifest}))
    for row in rows:
        left.add(Row.of(row))
    for canary in canaries:
        left.add_canary(Canary(**canary))
    if code is not None:
        left.finish({"exit_code": code}, {})
