"""How long kernels take to compile for the first time, and to load from the cache.

    python benchmarks/compile_time.py [--arch sm90] suites/ch07 suites/ch10

Compiles every .cu file of the pages (all its kernels at once), and every Triton kernel in every
configuration at its page's first size. Needs no GPU. Uses fresh caches in a temporary folder.
Prints the slowest kernels, and the slowest kernels of a second run with a full cache.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def timed(paths: list[Path], arch: str) -> None:
    """Print the seconds and the name of each kernel."""
    import triton

    from pytest_aisp.kernels import nvrtc
    from pytest_aisp.kernels.capture_launches import capture_launches
    from pytest_aisp.page.sources import kernel_files
    from pytest_aisp.worker.loader import load_page, pair_of

    def listener(*, src: Any, times: Any, **_: Any) -> None:
        print_time(times.total / 1e6, f"{current} {src.name}")

    triton.knobs.compilation.listener = listener
    nvrtc.toolchain()
    modules: dict[Path, Any] = {}
    for path in paths:
        current = path.name
        page = load_page(str(path), str(ROOT), f"compile_time.{path.stem}")
        for pair in filter(None, map(pair_of, vars(page).values())):
            for variant in (v for v in pair.variants if arch in pair.archs(v)):
                sides = pair.baseline, variant.side
                modules |= {module.path: module for module in kernel_files(sides, str(ROOT))}
                for side in sides:
                    capture_launches(pair, side, pair.sizes[0], arch, assemble=True)
    for path, module in sorted(modules.items()):
        start = time.perf_counter()
        module.assemble(arch)
        print_time(time.perf_counter() - start, path.name)


def print_time(seconds: float, name: str) -> None:
    """Print one line for the other process."""
    print(f"TIME {seconds:.4f} {name}", flush=True)


def main() -> int:
    """Run in two processes, and print the slowest kernels of each process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--arch", default="sm90")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    pages = [p.resolve() for f in options.folders for p in sorted(f.glob("*_test.py"))]
    if options.here:
        timed(pages, options.arch)
        return 0
    with tempfile.TemporaryDirectory() as caches:
        names = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TMPDIR")
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment |= {name: f"{caches}/{name.lower()}" for name in names}
        Path(environment["TMPDIR"]).mkdir()
        for start in ("first", "cached"):
            command = [
                sys.executable,
                __file__,
                "--here",
                "--arch",
                options.arch,
                *map(str, options.folders),
            ]
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            lines = [
                line.split(" ", 2)[1:]
                for line in done.stdout.splitlines()
                if line.startswith("TIME ")
            ]
            slowest = sorted(((float(s), name) for s, name in lines), reverse=True)
            print(f"{start}: {len(slowest)} compilations, the slowest:")
            for seconds, name in slowest[:6]:
                print(f"  {1e3 * seconds:8.1f} ms  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
