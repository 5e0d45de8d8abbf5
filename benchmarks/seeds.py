"""How often the checks refuse honest pages: check every page with many seeds, on the CPU.

    python benchmarks/seeds.py suites/ch01 suites/ch06 --seeds 20

Run it in the root of the source tree. Cases are checked at their check sizes, CUDA C++ in the
emulator. Cases that cannot run, as on several ranks, are left out. Exits with 1 after a refusal.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from pytest_aisp.checking.numerics import Wrong
from pytest_aisp.page.pair import PageError
from pytest_aisp.page.sources import kernel_files
from pytest_aisp.results.messages import CheckTask

LINE = "{}: {cases} cases, {checks} checks, {refused} refused; {left_out} cases left out"


def check_file(file: Path, seeds: int, seconds: float) -> tuple[Counter[str], list[str]]:
    """Return the counts for a file, and a line for each refusal and each case that is left out."""
    from pytest_aisp_emulator import emulated

    from pytest_aisp.worker.engine import Engine
    from pytest_aisp.worker.loader import load_page, pair_of

    at = {"page": str(file), "root": os.getcwd(), "module": f"{file.parent.name}.{file.stem}"}
    page, until = load_page(*at.values()), time.monotonic() + seconds
    rules = [
        (test.name, {k.arg: ast.literal_eval(k.value) for k in call.keywords})
        for test in ast.parse(file.read_text()).body
        for call in ast.walk(test)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pair.assert_equivalent"
    ]
    done, refused, left_out = Counter[str](), list[str](), dict[str, str]()
    for seed, engine in ((n, Engine()) for n in range(1, seeds + 1)):  # each checks a case once
        for name, rule in rules:
            for case in {c.variant_name: c for c in pair_of(vars(page)[name]).cases()}.values():
                key, given = f"{name}[{case.variant_name}]", {**at, "function": name, "rule": rule}
                given |= {"variant": case.variant_name, "size": case.size, "seed": seed}
                late = time.monotonic() > until
                if case.pair.multi_rank or case.variant.gpu_only or (late and not done[key]):
                    left_out.setdefault(key, f"left out: {key}: needs ranks, a GPU or more time")
                if late or key in left_out:
                    continue
                in_cuda = kernel_files([case.pair.baseline, case.variant.side], at["root"])
                try:
                    with emulated(seed) if in_cuda else contextlib.nullcontext():
                        engine.check(CheckTask(at="check", **given))
                except Exception as error:
                    text = f"{key}: {type(error).__name__}: {error}".splitlines()[0]
                    if done[key] or isinstance(error, (Wrong, PageError)):
                        refused.append(f"refused: {text} (seed {seed})")
                    else:
                        left_out[key] = f"left out: {text}"
                done[key] += key not in left_out
    counts = Counter(pages=int(any(done.values())), cases=len(+done), checks=done.total())
    counts.update(refused=len(refused), left_out=len(left_out))
    return counts, [*refused, *left_out.values()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=600.0, help="limit for each file")
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1"
    total = Counter[str]()
    for file in sorted(f.resolve() for d in options.folders for f in d.rglob("*_test.py")):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            counts, lines = pool.submit(check_file, file, options.seeds, options.seconds).result()
        total.update(counts)
        print(LINE.format("/".join(file.parts[-2:]), **counts), *lines, sep="\n  ", flush=True)
    print(LINE.format(f"{total['pages']} pages", **total))
    return bool(total["refused"])


if __name__ == "__main__":
    sys.exit(main())
