"""Error rates of the code gate (`--aisp-against`) on a GPU, compared with other tools.

    python benchmarks/code_gate.py record OUT.jsonl --minutes 9.5    on a GPU, one command
    python benchmarks/code_gate.py record OUT.jsonl --minutes 9.5 --python /other/bin/python
    python benchmarks/code_gate.py judge FILE.jsonl ...              anywhere, no torch
    python benchmarks/code_gate.py judge FILE.jsonl ... --check TABLE.md
    python benchmarks/code_gate.py laps FILE.jsonl ...               effect of the order of building

`record` times eight different kernels against themselves, unchanged and with a planted slowdown.
Fresh worker processes time them as the plugin times a changed side against its old code, and also
with `triton.testing.do_bench` and pytest-benchmark. `judge` prints the tables of
docs/explanation/code-gate.md. With `--check` it exits 1 if they differ from a stored table. With
`--rebuilt`, each kernel is timed against the same kernel of a copied page, as a changed side is
timed against its record. With `--python`, each kernel is timed against itself in another
environment, as `--aisp-against-python` does it.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
from pathlib import Path

import code_gate_judge


def record(options: argparse.Namespace) -> int:
    """Record; return 1 if there is no trial."""
    from code_gate_environments import EnvironmentsRecorder
    from code_gate_record import Plan, Recorder

    names = [field.name for field in dataclasses.fields(Plan)]
    plan = Plan(**{name: getattr(options, name) for name in names})
    kind = EnvironmentsRecorder if plan.python else Recorder
    recorder = kind(plan, options.out)
    recorder.run()
    return 0 if any(recorder.values.values()) else 1


def judge(options: argparse.Namespace) -> int:
    """Print the tables; return 1 if they differ from ``--check``."""
    recording = code_gate_judge.read(options.files)
    if not recording.kernels:
        print("no unchanged trial was recorded", file=sys.stderr)
        return 1
    text = code_gate_judge.report(code_gate_judge.judge(recording), options.suites)
    print(text, end="")
    if options.check is None or options.check.read_text() == text:
        return 0
    old, new = (t.splitlines() for t in (options.check.read_text(), text))
    print(*difflib.unified_diff(old, new, "stored", "now", lineterm=""), sep="\n", file=sys.stderr)
    return 1


def laps(options: argparse.Namespace) -> int:
    """Print the effect of the order of building."""
    print(code_gate_judge.lap_table(options.files))
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    main = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = main.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("out", type=Path)
    recorder.add_argument("--processes", type=int, default=21)
    recorder.add_argument("--rounds", type=int, help="most rounds over all kernels in a process")
    recorder.add_argument("--minutes", type=float, help="of wall-clock time for everything")
    recorder.add_argument("--others", type=int, default=2, help="kernels timed with other tools")
    recorder.add_argument(
        "--simulated", action="store_true", help="simulate instead of using a GPU"
    )
    recorder.add_argument("--in-process", action="store_true", help="no worker process; for tests")
    recorder.add_argument("--seed", type=int, default=0)
    recorder.add_argument("--rebuilt", action="store_true", help="compare with a copy of the page")
    recorder.add_argument("--python", default="", help="interpreter of a second environment")
    recorder.set_defaults(run=record)
    judger = commands.add_parser("judge")
    judger.add_argument("files", type=Path, nargs="+")
    judger.add_argument("--suites", type=int, default=20_000)
    judger.add_argument("--check", type=Path, help="a stored table")
    judger.set_defaults(run=judge)
    lapper = commands.add_parser("laps")
    lapper.add_argument("files", type=Path, nargs="+")
    lapper.set_defaults(run=laps)
    return main


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = parser().parse_args(arguments)
    if options.command == "record" and options.rounds is None and options.minutes is None:
        parser().error("record needs an end: --minutes 9.5, or --rounds 4")
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
