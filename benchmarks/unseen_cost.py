"""What it costs to give each call on the CPU's clock values that no side has seen.

    python benchmarks/unseen_cost.py FOLDER [rounds]

Checks and times each case for a CPU with and without the protection `new-values`, each time in a
forked process with one thread. Prints the median CPU seconds, with the process that draws values.
"""

from __future__ import annotations

import math
import os
import random
import sys
from collections import defaultdict
from statistics import median
from typing import Any

import pytest

from pytest_aisp.results.messages import CheckTask, TimeTask
from pytest_aisp.session.collect import case_of
from pytest_aisp.util import cpu_load
from pytest_aisp.worker import input_process
from pytest_aisp.worker.engine import Engine

WITHOUT: list[tuple[str, ...]] = [(), ("new-values",)]
CASES: dict[str, dict[str, Any]] = {}


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        if (case := case_of(item)) and case.kind == "cpu" and isinstance(item, pytest.Function):
            page = {"page": str(item.path), "module": item.path.stem, "function": item.originalname}
            own = {"variant": case.variant_name, "size": dict(case.size), "device": "cpu"}
            CASES[item.nodeid] = {"root": str(session.config.rootpath), **page, **own}


def cpu_seconds(fields: dict[str, Any], without: tuple[str, ...]) -> float:
    """Return the CPU seconds that it takes to check and time a case, or NaN if that fails."""
    if child := os.fork():
        _, status, usage = os.wait4(child, 0)
        return usage.ru_utime + usage.ru_stime if status == 0 else math.nan
    try:
        cpu_load.STOLEN = math.inf  # the ratio may be measured on a busy machine
        engine, check = Engine(), CheckTask(**fields, without=without)
        input_process.fork_early(check)
        engine.check(check)
        engine.time(TimeTask(**fields, without=without))
        input_process.close()
        os._exit(0)
    finally:
        os._exit(1)


def main(folder: str, rounds: int = 3) -> None:
    import torch

    torch.set_num_threads(1)  # idle threads would spin, and the forks need not import torch
    pytest.main(["--collect-only", "-qq", folder], plugins=[sys.modules[__name__]])
    for name, fields in CASES.items():
        taken = defaultdict(list)
        for without in [w for _ in range(rounds) for w in random.sample(WITHOUT, 2)]:
            taken[without].append(cpu_seconds(fields, without))
        new, old = (median(taken[without]) for without in WITHOUT)
        print(f"{new:.2f} s with, {old:.2f} s without, {new / old:.2f} times: {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
