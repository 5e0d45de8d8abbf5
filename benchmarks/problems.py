"""The share of KernelBench-style problems in a folder that `aisp judge` accepts.

    python benchmarks/problems.py FOLDER --check-only             # on a CPU, at small sizes
    python benchmarks/problems.py FOLDER --device cuda            # at the problems' own sizes

The candidates `self` and `compile` compute the same as the model. So a refusal is right only if the
model draws random numbers or its output is constant. Every candidate in bf16 should be refused. The
script prints a line for each problem, then a table of the reasons.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import math
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from pytest_aisp.cli.judge import lines
from pytest_aisp.judging.candidate_verdict import Verdict
from pytest_aisp.judging.files import run_problem
from pytest_aisp.judging.judge import Judge
from pytest_aisp.judging.processes import Processes
from pytest_aisp.util import pytree
from pytest_aisp.util.device import Machine

CANDIDATES = {
    "self": "",
    "compile": """

class ModelNew(Model):
    forward = torch.compile(Model.forward, dynamic=False)
""",
    "bf16": """

class ModelNew(Model):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.bfloat16()

    def forward(self, *arguments):
        half = [a.bfloat16() if torch.is_floating_point(a) else a for a in arguments]
        return torch.utils._pytree.tree_map(torch.Tensor.float, super().forward(*half))
""",
}
"""The code that is appended to a problem's file to make a candidate."""
SMALLEST = 8
"""Constants are not reduced below this. Smaller constants, such as strides, do not change."""
FACTORS = [2**power for power in range(20)]
"""Divisors of a problem's constants. The smallest divisor that suffices is used."""


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    files = sorted(options.folder.rglob("*.py"), key=natural)[options.start :: options.every]
    files = files[: options.limit]
    if not files:
        sys.exit(f"{options.folder} holds no problems: no file ends in .py")
    verdicts: list[Verdict] = []
    for verdict in judged(files, options):
        verdicts.append(verdict)
        print("\n".join([f"{verdict.spent:6.1f} s  {lines(verdict)[0]}", *lines(verdict)[1:2]]))
        if options.json:
            options.json.write_text(json.dumps(msgspec.to_builtins(verdicts), indent=1))
    print(table(verdicts, len(files)))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--candidate", choices=tuple(CANDIDATES), default="self")
    parser.add_argument("--check-only", action="store_true", help="check, do not time")
    parser.add_argument("--trusted", action="store_true", help="run no sandbox")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--elements",
        type=int,
        help="divide the sizes until no tensor has more elements; 0 keeps the problems' own sizes"
        " (default: 2^18 on a CPU, 0 on a GPU)",
    )
    parser.add_argument("--seeds", type=int, default=1, help="draws of the weights and inputs")
    parser.add_argument("--start", type=int, default=0, help="skip the first problems")
    parser.add_argument("--every", type=int, default=1, help="take every n-th problem")
    parser.add_argument("--limit", type=int, help="take at most so many problems")
    parser.add_argument("--jobs", type=int, help="problems at once (default: cores, or 1 on GPU)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds without progress")
    parser.add_argument("--budget-seconds", type=float, default=math.inf, help="start no more then")
    parser.add_argument("--json", type=Path, help="write the verdicts here after each problem")
    options = parser.parse_args(argv)
    if options.elements is None:
        options.elements = 0 if options.device == "cuda" else 2**18
    if options.jobs is None:
        options.jobs = 1 if options.device == "cuda" else os.cpu_count()
    return options


def natural(path: Path) -> list[tuple[int, str]]:
    """Return a key that sorts 2_b before 10_a."""
    parts = re.findall(r"\d+|\D+", str(path))
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def judged(files: Sequence[Path], options: argparse.Namespace) -> Iterator[Verdict]:
    """Yield the verdict on each problem, in the order of the files."""
    deadline = time.monotonic() + options.budget_seconds
    processes = Processes(Machine.here().gpus[:1] if options.device == "cuda" else (), None)

    def judge(file: Path) -> Verdict | None:
        if time.monotonic() > deadline:
            return None
        with tempfile.TemporaryDirectory() as folder:
            return _judge(file, Path(folder), options, processes)

    with ThreadPoolExecutor(options.jobs) as threads, contextlib.closing(processes):
        yield from filter(None, threads.map(judge, files))


def _judge(file: Path, folder: Path, options: argparse.Namespace, processes: Processes) -> Verdict:
    candidate = folder / file.name
    candidate.write_text(file.read_text() + CANDIDATES[options.candidate])
    given: dict[str, Any] = {"device": options.device, "timeout": options.timeout}
    given |= {"timed": not options.check_only, "untrusted": not options.trusted}
    sizes = smaller(file, options.elements)
    with Judge(file, sizes=sizes, seeds=options.seeds, processes=processes, **given) as judge:
        verdict = judge.judge(candidate)
    verdict.candidate = f"{file.parent.name}/{file.stem}"
    return verdict


def smaller(file: Path, elements: int) -> dict[str, object]:
    """Return smaller constants, so that no tensor of a problem has more elements than the limit.

    Some factors are invalid, for example if the number of groups no longer divides the channels.
    """
    largest: dict[int, int] = {}
    for factor in FACTORS if elements else ():
        with contextlib.suppress(Exception):
            largest[factor] = _largest(run_problem(file, divided(file, factor), "meta"))
            if largest[factor] <= elements:
                break
    return divided(file, min(largest, key=lambda factor: largest[factor], default=1))


def divided(file: Path, factor: int) -> dict[str, object]:
    """Return the integers that a problem's module assigns, divided by `factor`."""
    found: dict[str, object] = {}
    for statement in ast.parse(file.read_text()).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                with contextlib.suppress(ValueError):  # it is computed from other constants
                    found[name] = _divided(ast.literal_eval(value), factor)
    return found if factor > 1 else {}


def _divided(value: object, factor: int) -> object:
    if isinstance(value, (tuple, list)):
        return type(value)(_divided(element, factor) for element in value)
    if type(value) is not int or value < SMALLEST:
        return value
    return max(SMALLEST, value // factor)


def _largest(problem: dict[str, Any]) -> int:
    """Return the number of elements of a problem's largest parameter, argument or output."""
    import torch

    with torch.device("meta"), torch.no_grad():
        model = problem["Model"](*problem["get_init_inputs"]())
        arguments = problem["get_inputs"]()
        outputs: object = ()
        with contextlib.suppress(NotImplementedError):  # a shape that depends on values
            outputs = model(*arguments)
    tensors = [t for _, t in pytree.tensors((arguments, outputs))]
    return max(tensor.numel() for tensor in (*model.parameters(), *tensors))


def table(verdicts: Sequence[Verdict], wanted: int) -> str:
    """Return the counts by reason, and the median seconds."""
    rows = Counter(verdict.reason for verdict in verdicts).most_common()
    if wanted > len(verdicts):
        rows.append(("not started within the budget", wanted - len(verdicts)))
    found = ["", *(f"{count:5} {text}" for text, count in rows)]
    if verdicts:
        seconds = [verdict.spent for verdict in verdicts]
        found.append(f"median {median(seconds):.1f} s, longest {max(seconds):.1f} s")
    return "\n".join(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
