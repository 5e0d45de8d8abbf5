"""The command line: this machine's GPUs, the links between them, runs compared, training loops.

    aisp topology | bandwidth | nccl | nccl-env | compare | bottleneck
    also: python -m pytest_aisp.tools.cli

Exit codes: 0, all is well; 1, something here is wrong (no GPU, a slow hop, a rank that failed);
2, the question cannot be answered here, or was asked wrongly. Of bottleneck: the script's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..common.answers import Answer, Unanswerable, parse_bytes, parse_sizes

SIZES = {"cuda": "4KiB:512MiB", "cpu": "4KiB:4MiB"}
"""The default sizes of `aisp nccl`: Gloo on a CPU takes seconds where a GPU takes milliseconds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, print its answer, return its exit code."""
    options = parser().parse_args(arguments)
    try:
        found: Answer = options.run(options)
    except Unanswerable as error:
        print(error, file=sys.stderr)
        return error.code
    print("\n".join(found.lines))
    return found.code


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(prog="aisp", description=__doc__)
    top.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    add = commands.add_parser("topology", help="GPUs, links, NUMA nodes, who may read whom")
    _json(add)
    add.set_defaults(run=_topology)
    add = commands.add_parser("bandwidth", help="copies between every two GPUs; names slow hops")
    add.add_argument("--size", type=_typed(parse_bytes), default=1 << 30, help="default: 1GiB")
    _json(add)
    _store(add)
    add.set_defaults(run=_bandwidth)
    add = commands.add_parser("nccl", help="collectives by size, on ranks of our own")
    _collectives(add)
    _store(add)
    add.set_defaults(run=_nccl)
    add = commands.add_parser("nccl-env", help="variables of NCCL that are set, and what they mean")
    add.set_defaults(run=_nccl_env)
    add = commands.add_parser("compare", help="two runs or commits, metric by metric; 1 if worse")
    add.add_argument("old", help="a folder of artifacts or of stored results, or a git ref")
    add.add_argument("new", help="likewise")
    add.add_argument("--format", default="text", help="text, markdown or json; default: text")
    add.set_defaults(run=_compare)
    add = commands.add_parser("bottleneck", help="what the steps of a training script wait for")
    _script(add)
    add.set_defaults(run=_bottleneck)
    return top


def _json(add: argparse.ArgumentParser) -> None:
    add.add_argument("--json", action="store_true", help="one JSON object, with all that is known")


def _store(add: argparse.ArgumentParser) -> None:
    where = "keep the best rates in BASELINES/<product>-x<GPUs>/peaks.json"
    add.add_argument("--store", action="store_true", help=where)
    add.add_argument("--baselines", type=Path, default=Path("baselines"), help="default: baselines")


def _collectives(add: argparse.ArgumentParser) -> None:
    from ..bench.collectives import OPS
    from ..ranks.nccl import parse_ops

    add.add_argument("--ops", type=_typed(parse_ops), default=OPS, help=f"default: {','.join(OPS)}")
    default = f"default: {SIZES['cuda']}, on CPUs {SIZES['cpu']}; or 4KiB,1MiB"
    add.add_argument("--sizes", type=_typed(parse_sizes), help=default)
    add.add_argument("--ranks", type=int, help="default: one a GPU, or two on a CPU")
    add.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw busbw over size")
    add.add_argument("--timeout", type=float, default=120.0, help="seconds a rank may be silent")


def _script(add: argparse.ArgumentParser) -> None:
    _json(add)
    add.add_argument("--steps", type=_count(1), help="time so many, then end the script")
    add.add_argument("--warmup", type=_count(0), default=5, help="steps left out first; default: 5")
    add.add_argument("--profiled", type=_count(1), default=10, help="on a GPU; default: 10")
    add.add_argument("script", type=Path, help="what python would run")
    add.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def _count(least: int) -> Callable[[str], Any]:
    """Return what reads a whole number of `least` or more."""

    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"{text!r} is no number of steps; write {least} or more, as 100")
        return int(text)

    return _typed(count)


def _typed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return `parse` with its ValueError as argparse shows it: with the message."""

    def typed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return typed


def _tell(text: str) -> None:
    """Show what is being done on a terminal, on one line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _done() -> None:
    _tell("")


def _topology(options: argparse.Namespace) -> Answer:
    from ..ranks import topology

    return topology.answer(as_json=options.json)


def _bandwidth(options: argparse.Namespace) -> Answer:
    from ..ranks import bandwidth, keep

    if options.store:
        keep.refuse_under_ci()
    count, hops = bandwidth.here(options.size, _tell)
    _done()
    found = bandwidth.answer(hops, options.size, as_json=options.json)
    return _kept(options, found, count, lambda: bandwidth.rates(hops, options.size))


def _nccl(options: argparse.Namespace) -> Answer:
    from ..common.device import Machine
    from ..ranks import keep, nccl
    from . import curves

    if options.store:
        keep.refuse_under_ci()
    machine = Machine.here()
    device, _ = nccl.place(machine, options.ranks)
    sizes = options.sizes or parse_sizes(SIZES[device])
    sweep = nccl.run(
        machine, options.ops, sizes, ranks=options.ranks, timeout=options.timeout, tell=_tell
    )
    _done()
    found = nccl.answer(sweep)
    if options.plot is not None:
        found = _drawn(found, options.plot, curves.draw(sweep.rows, sweep.title))
    return _kept(options, found, sweep.ranks, lambda: nccl.rates(sweep))


def _drawn(found: Answer, path: Path, drawing: str) -> Answer:
    """Write the plot; the table is shown where that fails, too."""
    try:
        path.write_text(drawing, encoding="utf-8")
    except OSError as error:
        print(f"--plot={path}: cannot be written: {error}", file=sys.stderr)
        return replace(found, code=2)
    return replace(found, lines=[*found.lines, f"drawn in {path}"])


def _kept(
    options: argparse.Namespace,
    found: Answer,
    count: int,
    rates: Callable[[], tuple[dict[str, float], dict[str, str]]],
) -> Answer:
    """Store the rates where ``--store`` is given; say so on stderr: a JSON stays whole."""
    from ..common.device import Machine
    from ..ranks.keep import keep

    if not options.store:
        return found
    try:
        lines = keep(options.baselines, Machine.here(), count, *rates())
    except Unanswerable as error:  # what was measured is shown all the same
        print(error, file=sys.stderr)
        return replace(found, code=error.code)
    print("\n".join(lines), file=sys.stderr)
    return found


def _nccl_env(options: argparse.Namespace) -> Answer:
    from ..ranks import nccl_env

    return nccl_env.answer(os.environ, nccl_env.version())


def _compare(options: argparse.Namespace) -> Answer:
    from . import compare

    return compare.answer(options.old, options.new, form=options.format, root=Path.cwd())


def _bottleneck(options: argparse.Namespace) -> Answer:
    from . import script
    from .steps import Plan

    plan = Plan(options.warmup, options.profiled, options.steps)
    return script.answer(options.script, options.arguments, plan=plan, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
