"""The cost of values that no side has seen is printed for each case for a CPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "unseen_cost.py"

PAGE = """
import torch

from pytest_aisp import Work, compare


def inputs(device, n):
    return (torch.randn(n, device=device),)


def added(x):
    return x + x


def doubled(x):
    return x * 2


@compare(
    baseline=added,
    optimized=[doubled],
    inputs=inputs,
    reference=doubled,
    sizes=[{"n": 65536}],
    cpu_sizes=[{"n": 999}],
    work=lambda n: Work(read=4 * n, write=4 * n),
    bound="dram",
)
def test_doubled(pair):
    pair.assert_equivalent()
"""


def test_a_case_is_timed_with_and_without_the_protection(tmp_path):
    (tmp_path / "doubled_test.py").write_text(PAGE)
    command = [sys.executable, str(SCRIPT), str(tmp_path), "1"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    line = r"[\d.]+ s with, [\d.]+ s without, [\d.]+ times: .*test_doubled\[doubled-cpu-n999\]"
    assert re.search(line, run.stdout), run.stdout + run.stderr
