"""Made-up runs for the report: any number of cases, of every verdict, with samples."""

from __future__ import annotations

import hashlib
import json
import math
import random
from pathlib import Path
from typing import Any

VERDICTS = ("pass", "pass", "pass", "new", "improved", "stale", "inconclusive", "fail")
VERDICTS += ("regressed", "wrong", "invalid", "checked", "compiled")
UNTIMED = ("wrong", "checked", "compiled")
BOUNDS = ("dram", "tensor", "launch", "nvlink")
HELD = {"limit": None, "stored": None, "margin": 0.01, "slack": 0}
RATES = {"copy": 4.239e12, "read": 4.53e12, "write": 4.66e12, "fp32": 5.129e13, "bf16": 7.714e14}
PAGE = '''"""Doubling: one read instead of two.

Problem    Double {number} numbers.
"""

from pytest_aisp import compare, cuda_module

kernels = cuda_module("doubling.cu")
BLOCK = 256


def launch(kernel, x):
    return kernel[x.numel() // BLOCK, BLOCK](x)


def added(x):
    return launch(kernels.added, x)


def doubled(x):
    return launch(kernels.doubled, x)


@compare(baseline=added, optimized=[doubled], inputs=None)
def test_doubling(pair):
    pair.assert_speedup()
'''
KERNELS = """// added: adds x to itself.
// doubled: doubles it.

__device__ float twice(float x) { return 2 * x; }

extern "C" __global__ void added(const float* x, float* out) { out[threadIdx.x] = x[0] + x[0]; }

extern "C" __global__ void doubled(const float* x, float* out) { out[threadIdx.x] = twice(x[0]); }
"""


def made(count: int, *, started: str = "2026-11-22T07:52:10+00:00", **run: Any) -> dict[str, Any]:
    """Return the contents of `results.json` for `count` cases; `run` replaces some fields."""
    return {
        "schema": 1,
        "run": {**manifest(started), **run},
        "cases": [case(number) for number in range(count)],
        "canaries": [],
        "lost": [],
    }


def manifest(started: str) -> dict[str, Any]:
    """Return the facts of a run."""
    return {
        "version": "0.1.0",
        "started": started,
        "ended": started,
        "complete": True,
        "invalid": [],
        "not_written": [],
        "no_verdict": [],
        "no_canary": [],
        "mode": "measure",
        "root": ".",
        "python": "3.12.3",
        "packages": {"torch": "2.11.0", "triton": "3.6.0"},
        "machine": {
            "name": "NVIDIA H200",
            "product": "nvidia-h200",
            "arch": "sm90",
            "gpus": ["GPU-0"],
            "versions": {"driver": "580.159.04", "cuda": "13.0"},
            "facts": {"power_limit_w": 700},
            "clocks": {"sm_max": 1980},
        },
        "git": {"commit": "c0ffee123456", "branch": "main", "dirty": False},
        "environment": {"NCCL_SOCKET_IFNAME": "eth0"},
        "peaks": {"nvidia-h200": {"rates": RATES, "facts": {}, "from": "peaks.json"}},
    }


def case(number: int, **fields: Any) -> dict[str, Any]:
    """Return a case of a run; `fields` replace some of it."""
    rng = random.Random(number)
    verdict = VERDICTS[number % len(VERDICTS)]
    page, size = f"ch{number % 20 + 1:02}/doubling{number // 3}_test.py", {"n": 1024 << number % 5}
    value, seconds = math.exp(rng.gauss(0.6, 0.6)), 10 ** rng.uniform(-6, -3)
    timed = verdict not in UNTIMED
    flops = {"bf16": 2e11 * seconds * 1e3} if number % 2 else {}
    return {
        "id": f"{page}::test_doubling[doubled-n{size['n']}-{number}]",
        "key": f"test_doubling[doubled-{number}]",
        "page": page,
        "chapter": page.partition("/")[0],
        "function": "test_doubling",
        "baseline": "added" if timed else "",
        "variant": "doubled",
        "size": size,
        "gpus": 1,
        "product": "nvidia-h200",
        "arch": "sm90",
        "bound": BOUNDS[number % len(BOUNDS)],
        "clock": "graph" if timed else "",
        "verdict": verdict,
        "not_timed": "" if timed else "needs tcgen05 (sm100, sm103); this GPU is sm90",
        "speedup": {"value": value, "low": value / 1.01, "high": value * 1.01} if timed else None,
        "seconds": {"baseline": seconds * value, "optimized": seconds} if timed else None,
        "limit": {"name": "copy", "share": 0.8, "from": "peaks.json"} if timed else None,
        "work": {"read": 3e12 * seconds, "write": 0, "flops": flops, "wire": 0} if timed else {},
        "claim": {"at_least": 1.5, "from": "at_least on the page"} if timed else None,
        "stored": {"speedup": value * 1.02, "from": "baselines/ch01.json"} if timed else None,
        "spread": 0.0025,
        "detectable": 0.011,
        "votes": [value, value * 1.001, value * 0.999] if verdict == "regressed" else [],
        "goals": {
            "memory": {"baseline": 4096, "optimized": 2048, **HELD, "limit": 0.6},
            "launches": {"baseline": 63, "optimized": 2, **HELD},
            "energy": {"baseline": 2e-3, "optimized": 1e-3, "noise": 0.01, **HELD, "limit": 0.8},
            "goodput": {"baseline": 0.2, "optimized": 0.7, **HELD, "limit": 0.5},
        },
        "reasons": [f"{value:.3f}x against 1.500x (at_least on the page)"] if timed else [],
        "notes": ["checked at n=33; n=1001"] * 4,
        "remarks": [],
        "launch_bound": {},
        "environment": {},
        "sources": {},
        "session": None,
        "suspect": 0,
        "trials": [],
        "profile": {"tool": "torch", "folder": "profile", "files": ["profile/a b#1.json"]},
        "wall": 1.2,
        "samples": {"path": f"samples/{number:04}.json", "sha256": "0" * 64} if timed else None,
        **fields,
    }


def timing(seconds: tuple[float, float], seed: int = 0, blocks: int = 20) -> dict[str, Any]:
    """Return what one process measured: windows of both sides around `seconds`."""
    rng = random.Random(seed)
    sides = [[s * rng.gauss(1, 0.002) for _ in range(2 * blocks)] for s in seconds]
    return {
        "baseline": sides[0],
        "optimized": sides[1],
        "orders": [rng.choice(["ABBA", "BAAB"]) for _ in range(blocks)],
        "laps": [0.7] * 4,
        "dropped": ["thermal slowdown"],
        "dropped_at": [blocks // 2],
        "details": {
            "sm_mhz": [1905, 1980],
            "watts": [440, 698],
            "celsius": [50, 64],
            "as_called": [s * 1.1 for s in seconds],
            "peak_bytes": {"baseline": 4096, "optimized": 2048},
            "graph_nodes": {"baseline": {"kernel": 2.0}, "optimized": {"kernel": 1.0}},
            "looks": [[0, 1980, 440, 50], [blocks // 2, 1905, 698, 64]],
        },
    }


def sampled(folder: Path, number: int, one: dict[str, Any]) -> dict[str, str] | None:
    """Write the samples of a timed case; return the case's entry about them."""
    if not (one["samples"] and one["seconds"]):
        return one["samples"]
    both = (one["seconds"]["baseline"], one["seconds"]["optimized"])
    timings = [timing(both, number + 1000 * n) for n in range(1 + len(one["votes"]))]
    data = json.dumps({"checks": [], "timings": timings, "against": []}).encode()
    (folder / one["samples"]["path"]).write_bytes(data)
    return {**one["samples"], "sha256": hashlib.sha256(data).hexdigest()}


def timeline(*kernels: int) -> dict[str, Any]:
    """Return a profiler's timeline of both sides: a copy, and `kernels` on two streams."""
    sides = [
        {
            "bars": [[7, 0, 0, 4], *[[7 + n % 2, 1, 2 + 3 * n, 2.5] for n in range(count)]],
            "names": ["Memcpy HtoD (Pinned -> Device)", "void added<4>(float*, int)"],
            "count": count + 1,
            "streams": 2,
        }
        for count in kernels
    ]
    return {"calls": 3, "baseline": sides[0], "optimized": sides[1]}


def laid(folder: Path, results: dict[str, Any], *, pages: bool = False) -> Path:
    """Write a run's folder: results, samples of timed cases, and optionally its pages."""
    (folder / "samples").mkdir(parents=True)
    (folder / "profile").mkdir()
    (folder / "profile" / "timeline.json").write_text(json.dumps(timeline(8, 5)))
    for role, occupancy in (("baseline", 0.25), ("optimized", 0.5)):
        counters = {"kernels": 3, "occupancy": occupancy, "issue_slots": 0.4, "stall": "wait"}
        text = json.dumps({**counters, "stall_share": 0.6})
        (folder / "profile" / f"{role}.counters.json").write_text(text)
    cases = [one | {"samples": sampled(folder, n, one)} for n, one in enumerate(results["cases"])]
    text = json.dumps({**results, "cases": cases})
    (folder / "results.json").write_text(text, encoding="utf-8")
    for name in {one["page"] for one in results["cases"]} if pages else ():
        page = folder / name
        page.parent.mkdir(exist_ok=True)
        page.write_text(PAGE.replace("{number}", str(len(results["cases"]))))
        (page.parent / "doubling.cu").write_text(KERNELS)
    return folder
