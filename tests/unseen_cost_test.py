"""The cost of values that no side has seen is printed for each case for a CPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "unseen_cost.py"


def test_a_case_is_timed_with_and_without_the_protection(page, pytester):
    folder = page(more="cpu_sizes=[{'n': 999}],").parent
    command = [sys.executable, str(SCRIPT), str(folder), "1"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=pytester.path)
    line = r"[\d.]+ s with, [\d.]+ s without, [\d.]+ times: .*test_doubling\[doubled-cpu-n999\]"
    assert re.search(line, run.stdout), run.stdout + run.stderr
