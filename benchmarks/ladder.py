"""A ladder as one table: each rung's time, its speed relative to the library's, and its new
instructions.

    python benchmarks/ladder.py suites/ch10/gemm_test.py test_gemm [--write README.md]

Times are stored results (`baselines/`). Results whose sides have changed since are left out.
The script assembles the machine code without a GPU. The table lists the instructions that a rung
has and the previous rung does not have, and the reverse. The table leaves out instructions that do
not move data, multiply, or wait. With `--write` the table replaces the text between `<!-- ladder
-->` and `<!-- end of ladder -->`.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_aisp.kernels import sass
from pytest_aisp.kernels.cross_compile import AssembledKernel, Assembly
from pytest_aisp.page.pair import Pair
from pytest_aisp.page.sources import digest, text_digest
from pytest_aisp.results import store
from pytest_aisp.results.row import duration
from pytest_aisp.worker.loader import load_page, pair_of

ROOT = Path(__file__).parents[1]
ARCH_OF = {"nvidia-h200": "sm90"}
START, END = "<!-- ladder -->", "<!-- end of ladder -->"
RELEVANT = re.compile(
    r"(HGMMA|HMMA|UTC\w*|FFMA|LDGSTS|LDG|STG|LDS|STS|LDSM|STSM|LDTM|UTMA\w+|UBLKCP|SYNCS"
    r"|USETMAXREG|WARPGROUP|MEMBAR|BAR|UCGABAR\w*|ATOM\w*|RED|MATCH|SHFL|LDGDEPBAR)(\.|$)"
)
"""Instructions that move data, multiply, or wait."""
IGNORED_MODIFIERS = ("E", "SYS", "DEFER_BLOCKING", "ALL", "SYNC")


def built(page: Path, function: str, arch: str) -> Iterator[tuple[str, list[AssembledKernel]]]:
    """Yield the baseline and each variant with the kernels that it launches at its first size."""
    module = load_page(str(page), str(ROOT), f"ladder.{page.stem}")
    pairs = [pair for pair in map(pair_of, vars(module).values()) if pair is not None]
    pair = pair_of(getattr(module, function))
    if pair is None:
        raise SystemExit(f"{page} has no test {function!r} with @compare")
    for variant in (v for v in pair.variants if arch in pair.archs(v)):
        assembly = Assembly(pairs, pair, variant, pair.sizes[0], root=str(ROOT), progress=_quiet)
        assembly.run((arch,))
        if variant is pair.variants[0]:
            name = pair.baseline.__name__
            yield name, [kernel for kernel in assembly.assembled if kernel.side == name]
        yield variant.name, [k for k in assembly.assembled if k.side == variant.name]


def _quiet(text: str) -> None:
    """Show no progress."""


def relevant(kernels: list[AssembledKernel]) -> set[str]:
    """Return the instructions of `kernels` that move data, multiply, or wait."""
    relevant_instructions: set[str] = set()
    for kernel in kernels:
        for name, instructions in sass.instructions(kernel.cubin).items():
            if name == kernel.launch.name:
                relevant_instructions |= {short(i) for i in instructions if RELEVANT.match(i)}
    return relevant_instructions


def short(instruction: str) -> str:
    """Return an instruction without the modifiers that the table leaves out."""
    name, *modifiers = instruction.split(".")
    return ".".join([name, *(m for m in modifiers if m not in IGNORED_MODIFIERS)])


def table(page: Path, function: str, arch: str, results: Mapping[str, Any]) -> str:
    """Return the Markdown table of the page's ladder."""
    heads = ("rung", "time", "of the library", "registers", "new in its machine code", "gone")
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    before: set[str] = set()
    library = next((r for k, r in results.items() if "[library-" in k), None)
    for name, kernels in built(page, function, arch):
        now = relevant(kernels)
        mine = next((r for k, r in results.items() if f"[{name}-" in k), None)
        cells = [name, *_times(mine, library, results if not before else None)]
        cells += [", ".join(str(k.registers) for k in kernels) or "-"]
        cells += [_words(now - before), _words(before - now)] if kernels and before else ["", ""]
        lines.append("| " + " | ".join(cells) + " |")
        before = now or before
    return "\n".join(lines)


def current(page: Path, function: str, pair: Pair, results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results whose sides have not changed since, by their cases' ids."""
    kept = {}
    for case in pair.cases():
        result = results.get(f"{page.name}::{function}[{case.id}]")
        sides = {"baseline": pair.baseline, "optimized": case.variant.side}
        syntax = {role: digest(side, str(ROOT)) for role, side in sides.items()}
        text = {role: text_digest(side, str(ROOT)) for role, side in sides.items()}
        if result and dict(result.with_syntax(syntax, text).sources) == syntax:
            kept[f"[{case.id}]"] = result
    return kept


def _times(mine: Any, library: Any, everyone: Any) -> list[str]:
    """Return a rung's time and its share of the library's rate, against the same baseline."""
    if mine is None and everyone:  # the baseline: each rung's result has its time
        first = next(iter(everyone.values()))
        share = f"{1 / _speedup(library):.0%}" if library else ""
        return [duration(first.baseline_us * 1e-6), share]
    if mine is None:
        return ["not measured", ""]
    share = f"{_speedup(mine) / _speedup(library):.0%}" if library else ""
    return [duration(mine.optimized_us * 1e-6), share]


def _speedup(result: Any) -> float:
    return math.exp(result.value)


def _words(instructions: set[str]) -> str:
    return ", ".join(f"`{i}`" for i in sorted(instructions))


def main() -> int:
    """Print or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path)
    parser.add_argument("function")
    parser.add_argument("--product", default="nvidia-h200", choices=sorted(ARCH_OF))
    parser.add_argument("--write", type=Path, help="a file with the two marks")
    options = parser.parse_args()
    file = ROOT / "baselines" / options.product / f"{options.page.resolve().parent.name}.json"
    known = store.load(file).results if file.exists() else {}
    page = options.page.resolve()
    timed = {key: result for key, result in known.items() if result.value is not None}
    module = load_page(str(page), str(ROOT), f"ladder.{page.stem}")
    pair = pair_of(getattr(module, options.function))
    results = current(page, options.function, pair, timed) if pair else {}
    where = page, options.function, ARCH_OF[options.product], results
    if options.write is None:
        print(table(*where))
        return 0
    before, start_mark, rest = options.write.read_text().partition(START)
    _, end_mark, after = rest.partition(END)
    if not start_mark or not end_mark:
        raise SystemExit(f"{options.write} lacks the marks of the table: {START} and {END}")
    options.write.write_text(f"{before}{START}\n{table(*where)}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
