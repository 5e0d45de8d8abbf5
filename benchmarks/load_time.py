"""The cost of loading the plugin in an unrelated pytest session.

    python benchmarks/load_time.py [rounds]

Measures the CPU time of `pytest --collect-only` on one trivial test, alternately with the plugin
and with `-p no:aisp`. Prints the median difference and its 99 % interval, in milliseconds.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median


def cpu_ms(folder: str, *options: str) -> float:
    before = os.times()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    after = os.times()
    used = after.children_user + after.children_system
    return 1e3 * (used - before.children_user - before.children_system)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_one.py").write_text("def test_one():\n    pass\n")
        cpu_ms(folder)
        differences = []
        for _ in range(rounds):
            order = [("with", ()), ("without", ("-p", "no:aisp"))]
            random.shuffle(order)
            taken = {name: cpu_ms(folder, *options) for name, options in order}
            differences.append(taken["with"] - taken["without"])
    resampled = sorted(median(random.choices(differences, k=rounds)) for _ in range(10_000))
    low, high = resampled[50], resampled[-51]
    print(f"{median(differences):.1f} ms [{low:.1f}, {high:.1f}] over {rounds} interleaved pairs")


if __name__ == "__main__":
    main()
