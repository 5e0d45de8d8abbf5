"""The spread of repeated measurements of one ratio, by block, capture, process and session.

    python benchmarks/spread.py run OUT.json [--processes 8]     one session, on a GPU
    python benchmarks/spread.py table OUT1.json OUT2.json ...    the table of spread.md

There are six different pairs. For each of them, the optimized side is also timed against a copy of
itself (A/A). Each process builds every pair 4 times, with new buffers and captures, and runs 10
blocks each time.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

CAPTURES, BLOCKS = 4, 10


def pairs() -> dict[str, Any]:
    import torch
    from torch.nn import functional as F

    from pytest_aisp.page.pair import Pair, Variant, Work

    def pair(baseline: Any, optimized: Any, inputs: Any, *, bound: str, l2: str = "cold") -> Pair:
        return Pair(
            baseline=baseline, variants=(Variant(optimized),), inputs=inputs,
            reference=optimized, sizes=({},), check_sizes=({},), cpu_sizes=(),
            work=lambda: Work(), bound=bound, state=None, at_least=1.0, needs=(), gpus=(1,),
            l2=l2, owns=(),
        )  # fmt: skip

    def randn(*shape: int, dtype: torch.dtype = torch.float32, count: int = 1) -> Any:
        return lambda device: tuple(
            torch.randn(*shape, device=device, dtype=dtype) for _ in range(count)
        )

    def two_passes(x: Any) -> Any:
        return x.mul(2).add_(1)

    def one_pass(x: Any) -> Any:
        return torch.add(1, x, alpha=2)

    def lgamma(x: Any) -> Any:
        return torch.lgamma(x)

    def copy(x: Any) -> Any:
        return x.clone()

    def gemm_fp16(a: Any, b: Any) -> Any:
        return a.half() @ b.half()

    def gemm_bf16(a: Any, b: Any) -> Any:
        return a @ b

    def small_two(x: Any) -> Any:
        return (x * 2) + 1

    def small_one(x: Any) -> Any:
        return torch.add(1, x, alpha=2)

    def loop(*xs: Any) -> Any:
        return [x * 2 for x in xs]

    def foreach(*xs: Any) -> Any:
        return torch._foreach_mul(xs, 2)

    def chain(x: Any) -> Any:
        return F.gelu(1.5 * x + 0.5)

    compiled = torch.compile(chain)

    def compiled_chain(x: Any) -> Any:
        return compiled(x)

    bf16 = torch.bfloat16
    return {
        "DRAM / DRAM": pair(two_passes, one_pass, randn(2**26), bound="dram"),
        "clock / DRAM": pair(lgamma, copy, randn(2**25), bound="dram"),
        "GEMM, power-limited": pair(
            gemm_fp16, gemm_bf16, randn(8192, 8192, dtype=bf16, count=2), bound="tensor"
        ),
        "2 us": pair(small_two, small_one, randn(2**16), bound="l2", l2="warm"),
        "host-bound": pair(loop, foreach, randn(2**10, count=64), bound="launch"),
        "compiled": pair(chain, compiled_chain, randn(2**24, dtype=bf16), bound="dram"),
    }


def one_process(seed: int) -> list[dict[str, Any]]:
    """Measure every pair in this process and return one row per capture."""
    import torch

    from pytest_aisp.checking.inputs import BoundSide, InputPool
    from pytest_aisp.timing import schedule
    from pytest_aisp.timing.cuda_timer import CudaPairTimer

    budget = schedule.Budget(blocks=BLOCKS, seconds=10)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    rows = []
    for name, pair in pairs().items():
        optimized = pair.variants[0].side
        for kind, first in (("A/B", pair.baseline), ("A/A", optimized)):
            for capture in range(CAPTURES):
                pool = InputPool(pair, {}, "cuda", seed * 100 + capture)
                probe = BoundSide(first, [pool.value_set(0)])
                out = sum(t.untyped_storage().nbytes() for t in _flat(probe.run(0)))
                probe.close()
                pool.lay_slots(pool.slots_for(out, l2, torch.cuda.mem_get_info()[0]))
                sides = pool.bind(first), pool.bind(optimized)
                timer = CudaPairTimer(pool, sides, budget)
                samples = schedule.measure(timer, budget, random.Random(seed * 100 + capture))
                rows.append(
                    {
                        "pair": name, "kind": kind, "capture": capture, "clock": samples.clock,
                        "blocks": samples.blocks, "baseline_us": 1e6 * median(samples.baseline),
                        "optimized_us": 1e6 * median(samples.optimized), **samples.details,
                    }
                )  # fmt: skip
                del timer, sides, pool, probe
                gc.collect()
                torch.cuda.empty_cache()
    return rows


def _flat(tree: Any) -> Iterator[Any]:
    from pytest_aisp.util import pytree

    return (t for _, t in pytree.tensors(tree))


def run(out: Path, processes: int) -> None:
    import torch

    rows = []
    for process in range(processes):
        child = [sys.executable, __file__, "child", str(process)]
        done = subprocess.run(child, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        rows += [{"process": process, **row} for row in json.loads(done.stdout.splitlines()[-1])]
        out.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}))
        print(process, len(rows), flush=True)


def table(files: Sequence[Path]) -> None:
    """Print the standard deviations of each pair by level, in % of the ratio."""
    rows = [
        {"session": s, **r} for s, f in enumerate(files) for r in json.loads(f.read_text())["rows"]
    ]
    keys = sorted({(r["kind"], r["pair"]) for r in rows})
    print(
        "| pair | kind | clock | times (us) | block | capture | process | session | one process |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for kind, name in keys:
        mine = [r for r in rows if (r["kind"], r["pair"]) == (kind, name)]
        block, capture, process, session, value = components(mine)
        times = f"{median(r['baseline_us'] for r in mine):.4g} / "
        times += f"{median(r['optimized_us'] for r in mine):.4g}"
        print(
            f"| {name} | {kind} | {mine[0]['clock']} | {times} | "
            + " | ".join(f"{100 * v:.2f}" for v in (block, capture, process, session, value))
            + " |"
        )


def components(rows: Sequence[dict[str, Any]]) -> tuple[float, ...]:
    """Return the sds of block, capture, process and session, and of a process's value."""
    tree: dict[int, dict[int, list[list[float]]]] = {}
    for r in rows:
        tree.setdefault(r["session"], {}).setdefault(r["process"], []).append(r["blocks"])
    captures = [c for s in tree.values() for p in s.values() for c in p]
    block = fmean(_variance(c) for c in captures)
    per_block = len(captures[0])
    capture = fmean(_variance([fmean(c) for c in p]) for s in tree.values() for p in s.values())
    means = {s: [fmean(fmean(c) for c in p) for p in ps.values()] for s, ps in tree.items()}
    process = fmean(_variance(m) for m in means.values())
    session = _variance([fmean(m) for m in means.values()]) if len(means) > 1 else math.nan
    count = len(next(iter(means.values())))
    singles = [[fmean(p[0]) for p in ps.values()] for ps in tree.values()]
    return (
        math.sqrt(block),
        math.sqrt(max(0.0, capture - block / per_block)),
        math.sqrt(max(0.0, process - capture / CAPTURES)),
        math.sqrt(max(0.0, session - process / count)) if len(means) > 1 else math.nan,
        math.sqrt(fmean(_variance(s) for s in singles)),
    )


def _variance(values: Sequence[float]) -> float:
    centre = fmean(values)
    return sum((v - centre) ** 2 for v in values) / (len(values) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("out", type=Path)
    runner.add_argument("--processes", type=int, default=8)
    commands.add_parser("child").add_argument("seed", type=int)
    commands.add_parser("table").add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "run":
        run(options.out, options.processes)
    elif options.command == "child":
        print(json.dumps(one_process(options.seed)))
    else:
        table(options.files)


if __name__ == "__main__":
    main()
