"""`aisp topology | bandwidth | nccl | nccl-env | bottleneck`: links, and what a loop waits for."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..timing.collectives import OPS
from ..util.cli_result import CliResult, parse_bytes, parse_sizes
from .console import HERE, Baselines, Json, Store, complain, finish, kept, parsed, telling

SIZES = {"cuda": "4KiB:512MiB", "cpu": "4KiB:4MiB"}
"""The default sizes of `aisp nccl`: Gloo on a CPU takes seconds where a GPU takes milliseconds."""


def add_to(app: typer.Typer) -> None:
    """Add the commands of this module to `app`."""
    app.command()(topology)
    app.command()(bandwidth)
    app.command()(nccl)
    app.command("nccl-env")(nccl_env)
    # What stands behind the script is the script's, `--json` too.
    app.command(context_settings={"allow_interspersed_args": False})(bottleneck)


def topology(as_json: Json = False) -> None:
    """Show GPUs, links, NUMA nodes, who may read whom."""
    from ..distributed import topology

    finish(topology.topology_result(as_json=as_json))


def bandwidth(
    size: Annotated[str, typer.Option(metavar="SIZE", help="bytes of a copy")] = "1GiB",
    as_json: Json = False,
    store: Store = False,
    baselines: Baselines = HERE,
) -> None:
    """Copy between every two GPUs; name slow hops."""
    from ..distributed import bandwidth
    from ..util.device import Machine

    nbytes = parsed("--size", parse_bytes, size)
    if store:
        bandwidth.refuse_under_ci()
    with telling() as tell:
        count, hops = bandwidth.measure_visible_gpus(nbytes, tell)
    found = bandwidth.bandwidth_result(hops, nbytes, as_json=as_json)
    if store:
        found = kept(
            found,
            lambda: bandwidth.store_peaks(
                baselines, Machine.here(), count, *bandwidth.peer_peaks(hops, nbytes)
            ),
        )
    finish(found)


def nccl(
    ops: Annotated[str, typer.Option(metavar="OPS", help="collectives")] = ",".join(OPS),
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help=f"default: {SIZES['cuda']}, on CPUs {SIZES['cpu']}; or 4KiB,1MiB",
        ),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="default: one a GPU, or two on a CPU")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="draw busbw over size")
    ] = None,
    timeout: Annotated[float, typer.Option(help="seconds a rank may be silent")] = 120.0,
    store: Store = False,
    baselines: Baselines = HERE,
) -> None:
    """Time collectives by size, on ranks of our own."""
    from ..distributed import bandwidth, nccl
    from ..distributed.plot import draw
    from ..util.device import Machine

    wanted = parsed("--ops", nccl.parse_ops, ops)
    given = None if sizes is None else parsed("--sizes", parse_sizes, sizes)
    if store:
        bandwidth.refuse_under_ci()
    machine = Machine.here()
    device, _ = nccl.choose_ranks(machine, ranks)
    asked = given or parse_sizes(SIZES[device])
    with telling() as tell:
        sweep = nccl.measure_collectives(
            machine, wanted, asked, ranks=ranks, timeout=timeout, progress=tell
        )
    found = nccl.nccl_result(sweep)
    if plot is not None:
        found = _drawn(found, plot, draw(sweep.rows, sweep.title))
    if store:
        found = kept(
            found,
            lambda: bandwidth.store_peaks(
                baselines, machine, sweep.ranks, *nccl.collective_peaks(sweep)
            ),
        )
    finish(found)


def _drawn(found: CliResult, path: Path, drawing: str) -> CliResult:
    """Write the plot; the table is shown where that fails, too."""
    try:
        path.write_text(drawing, encoding="utf-8")
    except OSError as error:
        complain(f"--plot={path}: cannot be written: {error}")
        return replace(found, code=2)
    return replace(found, lines=[*found.lines, f"drawn in {path}"])


def nccl_env() -> None:
    """Show the variables of NCCL that are set, and what they mean."""
    from ..distributed import nccl

    finish(nccl.nccl_env_result(os.environ, nccl.nccl_version()))


def bottleneck(
    script: Annotated[Path, typer.Argument(help="what python would run")],
    arguments: Annotated[list[str] | None, typer.Argument(help="its arguments")] = None,
    as_json: Json = False,
    steps: Annotated[
        str | None, typer.Option(metavar="N", help="time so many, then end the script")
    ] = None,
    warmup: Annotated[str, typer.Option(metavar="N", help="steps left out first")] = "5",
    profiled: Annotated[str, typer.Option(metavar="N", help="steps profiled, on a GPU")] = "10",
) -> None:
    """Run a training script: what do its steps wait for?"""
    from ..bottleneck import script as scripts
    from ..bottleneck.steps import Plan

    plan = Plan(
        parsed("--warmup", _count(0), warmup),
        parsed("--profiled", _count(1), profiled),
        None if steps is None else parsed("--steps", _count(1), steps),
    )
    finish(scripts.run_script(script, arguments or [], plan=plan, as_json=as_json))


def _count(least: int) -> Callable[[str], int]:
    """Return what reads a whole number of `least` or more."""

    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"{text!r} is no number of steps; write {least} or more, as 100")
        return int(text)

    return count
