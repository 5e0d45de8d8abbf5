"""How verdicts change while another process computes on the same GPU.

    python benchmarks/neighbors.py [--shares 0,0.1,0.3,0.9] [--cases 20] [--seconds 270] [--out DIR]

For each share, a second process multiplies matrices for that share of the time. Meanwhile, pytest
runs the same cases with stored results. The table counts the red cases, the cases without a
verdict, the cases whose row names the other process, and the green cases. The table also shows by
how much the speedups of green cases differ from the stored speedups. The exit code is 1 if a case
is red. The exit code is also 1 if, at a share of 30 % or more, the row of a case does not name the
other process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from pytest_aisp.results.row import JournalLine
from pytest_aisp.results.run_reader import load
from pytest_aisp.results.verdict import DISTURBED, RED
from pytest_aisp.util import device

ROOT = Path(__file__).parents[1]
CHAPTERS = ("ch01", "ch07")
LONGEST_US = 6_000
"""Only cases whose baseline takes less than this are run."""
PERIOD = 0.02
"""The period, in seconds, of the other process's busy and idle time."""
MATRIX = 2048
HEADS = ("share", "cases", "red", "no verdict", "named", "green", "deviation", "exit", "seconds")


class Level(NamedTuple):
    """The outcome of the cases next to a process that uses `share` of the GPU."""

    share: float
    cases: Sequence[JournalLine]
    code: int
    seconds: float

    @property
    def green(self) -> list[JournalLine]:
        return [case for case in self.cases if case.verdict not in (*RED, DISTURBED)]

    def cells(self) -> list[str]:
        off = [
            abs(case.value - case.stored)
            for case in self.green
            if case.value is not None and case.stored is not None
        ]
        counts = [
            len(self.cases),
            sum(case.verdict in RED for case in self.cases),
            sum(case.verdict == DISTURBED for case in self.cases),
            sum(map(is_named, self.cases)),
            len(self.green),
        ]
        deviation = f"{median(off):.2%}, at most {max(off):.1%}" if off else "-"
        return [
            f"{self.share:.0%}",
            *map(str, counts),
            deviation,
            str(self.code),
            f"{self.seconds:.0f}",
        ]

    @property
    def good(self) -> bool:
        red = any(case.verdict in RED for case in self.cases)
        named = all(map(is_named, self.cases)) if self.share >= 0.3 else True
        accused = self.share == 0 and any(map(is_named, self.cases))
        return bool(self.cases) and named and not red and not accused


def is_named(case: JournalLine) -> bool:
    """Return whether a case's row says that another process used the GPU."""
    return any("of this GPU" in text for text in [*case.reasons, *case.remarks])


def neighbor(share: float) -> None:
    """Multiply matrices for `share` of the time, until this process is killed."""
    import torch

    a = torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16)

    def busy(products: int) -> float:
        start = time.perf_counter()
        for _ in range(products):
            torch.mm(a, a)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    busy(100)
    products = max(1, round(share * PERIOD / (busy(100) / 100)))
    print(f"ready: {products} products every {PERIOD * 1e3:.0f} ms", flush=True)
    while True:
        start = time.perf_counter()
        busy(products)
        time.sleep(max(0.0, PERIOD - (time.perf_counter() - start)))


@contextmanager
def beside(share: float) -> Iterator[None]:
    """Run a process that uses `share` of the GPU inside the block."""
    if not share:
        yield
        return
    command = [sys.executable, __file__, "--neighbor", str(share)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            print(f"{share:.0%}:", process.stdout.readline().strip(), flush=True)
            yield
        finally:
            process.kill()


def show_instruments() -> None:
    """Print what the timing chains and NVML report about other processes while this one is idle."""
    from pytest_aisp.timing import neighbors
    from pytest_aisp.util.device_state import OtherProcesses

    read = neighbors.slice_reader()
    others = OtherProcesses(0)
    nvml, handles = device.load_nvml(), device.visible_gpus(device.load_nvml())
    time.sleep(1.2)  # NVML averages over up to a second
    if nvml is not None:
        used = device.query(nvml.nvmlDeviceGetUtilizationRates, handles[0])
        print("  NVML: utilization", used and used.gpu, "%, processes", others.shares() or "hidden")
    if read is None:
        print("  no compiler: time slices are not detected")
        return
    start, seen = time.perf_counter(), [read() for _ in range(10)]
    each = (time.perf_counter() - start) / 10
    texts = ["late" if s is None else f"{s.lost / s.total:.0%}/{s.longest * 1e3:.2f}" for s in seen]
    print(f"  chains of {each * 1e3:.1f} ms, lost/longest ms:", " ".join(texts), flush=True)


def node_ids(product: str, count: int) -> list[str]:
    """Return `count` cases with stored results, spread evenly over the chapters."""
    found = []
    for chapter in CHAPTERS:
        stored = json.loads((ROOT / "baselines" / product / f"{chapter}.json").read_text())
        found += [
            f"suites/{chapter}/{key}"
            for key, result in stored["results"].items()
            if result.get("clock") in ("graph", "host") and result["baseline_us"] < LONGEST_US
        ]
    return [found[len(found) * number // count] for number in range(min(count, len(found)))]


def run_cases(share: float, cases: Sequence[str], folder: Path, seconds: float) -> Level:
    """Run `cases` with pytest next to a process that uses `share` of the GPU."""
    artifacts, start = folder / f"share-{share:g}", time.monotonic()
    options = ["-q", f"--aisp-artifacts={artifacts}", "-p", "no:cacheprovider"]
    limits = {"aisp_wait": 1, "aisp_confirm_budget": 25, "aisp_suite_timeout": f"{seconds:.0f}"}
    options += [f"-o{name}={value}" for name, value in limits.items()]
    with beside(share):
        if device.Machine.here().gpus:
            show_instruments()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *cases],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
    taken = time.monotonic() - start
    try:
        found = list(load(artifacts).lines)
    except Exception as error:  # no case finished: show pytest's output
        print(f"  {error}\n{done.stdout[-3000:]}\n{done.stderr[-1000:]}")
        found = []
    for case in found:
        texts = [*case.reasons, *case.remarks]
        if case.verdict in RED or texts:
            print(f"  {case.verdict:9} {case.variant}: {'; '.join(texts)[:230]}")
    closing = [line for line in done.stdout.splitlines() if line.startswith(("RUN", "DISTURBED"))]
    print("\n".join(f"  {line}" for line in [*closing, done.stdout.strip().rpartition("\n")[2]]))
    print(f"  {dict(Counter(case.verdict for case in found))} in {taken:.0f} s", flush=True)
    return Level(share, found, done.returncode, taken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shares", default="0,0.1,0.3,0.9")
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=270.0)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--product", default="", help="whose stored cases to run")
    parser.add_argument("--neighbor", type=float, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.neighbor is not None:
        neighbor(given.neighbor)
    end = time.monotonic() + given.seconds
    folder = given.out or Path(tempfile.mkdtemp(prefix="aisp-neighbors-"))
    shares = [float(share) for share in given.shares.split(",")]
    cases = node_ids(given.product or device.Machine.here().product, given.cases)
    levels = []
    for number, share in enumerate(shares):
        rest = (end - time.monotonic()) / (len(shares) - number)
        levels.append(run_cases(share, cases, folder, max(10.0, rest - 12.0)))
    rows = [HEADS, *(level.cells() for level in levels)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    return 0 if all(level.good for level in levels) else 1


if __name__ == "__main__":
    sys.exit(main())
