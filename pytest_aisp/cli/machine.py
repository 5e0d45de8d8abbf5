"""`aisp machine ...`, `aisp links ...` and `aisp bottleneck`: this machine and its GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..timing.collectives import OPS
from ..util.cli_result import CliResult, parse_bytes, parse_sizes
from .console import (
    DEFAULT_BASELINES,
    Baselines,
    Json,
    Store,
    Yes,
    finish,
    parse_option,
    print_error,
    show_progress,
    store_measured,
)

SIZES = {"cuda": "4KiB:512MiB", "cpu": "4KiB:4MiB"}
"""The default sizes of `aisp links nccl`; Gloo on a CPU is about 1000 times slower than a GPU."""


def peak(
    as_json: Json = False, store: Store = False, baselines: Baselines = DEFAULT_BASELINES
) -> None:
    """Measure the peak rates of this machine."""
    from ..distributed import bandwidth
    from ..tools import roofline
    from ..util.device import Machine

    if store:
        bandwidth.refuse_under_ci()
    with show_progress() as tell:
        measured = roofline.measure_peaks(Machine.here(), tell)
    found = roofline.peak_result(measured, as_json=as_json)
    if store:
        found = store_measured(found, lambda: roofline.store_peaks(measured, baselines))
    finish(found)


def doctor(as_json: Json = False) -> None:
    """Find what disturbs measurements on this machine."""
    from ..tools import doctor

    finish(doctor.doctor_result(doctor.examine(), as_json=as_json))


def clean(yes: Yes = False, as_json: Json = False) -> None:
    """List files that runs left behind."""
    from ..tools import catalog, maintenance

    with show_progress() as tell:
        found = catalog.collect((), tell=tell)
    finish(maintenance.clean_result(found, yes=yes, as_json=as_json))


def topology(as_json: Json = False) -> None:
    """Show GPUs, their links, NUMA nodes and peer access."""
    from ..distributed import topology

    finish(topology.topology_result(as_json=as_json))


def bandwidth(
    size: Annotated[str, typer.Option(metavar="SIZE", help="size of a copy")] = "1GiB",
    as_json: Json = False,
    store: Store = False,
    baselines: Baselines = DEFAULT_BASELINES,
) -> None:
    """Measure copies between all GPUs and name slow links."""
    from ..distributed import bandwidth
    from ..util.device import Machine

    nbytes = parse_option("--size", parse_bytes, size)
    if store:
        bandwidth.refuse_under_ci()
    with show_progress() as tell:
        count, hops = bandwidth.measure_visible_gpus(nbytes, tell)
    found = bandwidth.bandwidth_result(hops, nbytes, as_json=as_json)
    if store:
        found = store_measured(
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
    ranks: Annotated[int | None, typer.Option(help="default: one per GPU, or two on a CPU")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="draw busbw over size")
    ] = None,
    timeout: Annotated[float, typer.Option(help="seconds a rank may be silent")] = 120.0,
    store: Store = False,
    baselines: Baselines = DEFAULT_BASELINES,
) -> None:
    """Measure collectives of NCCL by size."""
    from ..distributed import bandwidth, nccl
    from ..distributed.plot import draw
    from ..util.device import Machine

    wanted = parse_option("--ops", nccl.parse_ops, ops)
    given = None if sizes is None else parse_option("--sizes", parse_sizes, sizes)
    if store:
        bandwidth.refuse_under_ci()
    machine = Machine.here()
    device, _ = nccl.choose_ranks(machine, ranks)
    asked = given or parse_sizes(SIZES[device])
    with show_progress() as tell:
        sweep = nccl.measure_collectives(
            machine, wanted, asked, ranks=ranks, timeout=timeout, progress=tell
        )
    found = nccl.nccl_result(sweep)
    if plot is not None:
        found = _drawn(found, plot, draw(sweep.rows, sweep.title))
    if store:
        found = store_measured(
            found,
            lambda: bandwidth.store_peaks(
                baselines, machine, sweep.ranks, *nccl.collective_peaks(sweep)
            ),
        )
    finish(found)


def _drawn(found: CliResult, path: Path, drawing: str) -> CliResult:
    """Write the plot; if that fails, keep the table and return exit code 2."""
    try:
        path.write_text(drawing, encoding="utf-8")
    except OSError as error:
        print_error(f"--plot={path}: cannot be written: {error}")
        return replace(found, code=2)
    return replace(found, lines=[*found.lines, f"drawn in {path}"])


def nccl_env() -> None:
    """Show and explain the variables of NCCL that are set."""
    from ..distributed import nccl

    finish(nccl.nccl_env_result(os.environ, nccl.nccl_version()))


def bottleneck(
    script: Annotated[Path, typer.Argument(help="the script")],
    arguments: Annotated[list[str] | None, typer.Argument(help="its arguments")] = None,
    as_json: Json = False,
    steps: Annotated[
        str | None, typer.Option(metavar="N", help="end the script after N timed steps")
    ] = None,
    warmup: Annotated[str, typer.Option(metavar="N", help="first steps to leave out")] = "5",
    profiled: Annotated[str, typer.Option(metavar="N", help="steps to profile on a GPU")] = "10",
) -> None:
    """Run a training script and show what its steps wait for."""
    from ..training_loop.loop import Plan
    from ..training_loop.watch import bottleneck_result

    plan = Plan(
        parse_option("--warmup", _count(0), warmup),
        parse_option("--profiled", _count(1), profiled),
        None if steps is None else parse_option("--steps", _count(1), steps),
    )
    finish(bottleneck_result(script, arguments or [], plan=plan, as_json=as_json))


def _count(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers that are at least `least`."""

    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"{text!r} is no number of steps; write {least} or more, as 100")
        return int(text)

    return count
