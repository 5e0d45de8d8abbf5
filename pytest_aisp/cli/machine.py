"""`aisp machine`, `aisp links`, `aisp fleet` and `aisp bottleneck`: machines and their GPUs."""

from __future__ import annotations

import os
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

Timeout = Annotated[
    float, typer.Option(metavar="SECONDS", help="stop if a rank is silent for this long")
]
Head = Annotated[
    bool, typer.Option("--head", help="make this machine the first one of the cluster")
]
Address = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="the address of the first machine")
]
Show = Annotated[bool, typer.Option("--show", help="print the Ray command, but do not run it")]
Block = Annotated[bool, typer.Option("--block", help="wait until Ray ends; needed in a Slurm step")]
Gpus = Annotated[int, typer.Option(metavar="N", min=0, help="the number of simulated GPUs")]
Only = Annotated[str | None, typer.Option(metavar="PRODUCT", help="default: all products")]
SIZES = {"cuda": "4KiB:512MiB", "cpu": "4KiB:4MiB"}
"""The default sizes of `aisp links nccl`. Gloo on CPUs is about 1000 times slower than NCCL."""


def peak(
    as_json: Json = False,
    store: Store = False,
    baselines: Baselines = DEFAULT_BASELINES,
    hierarchy: Annotated[
        bool, typer.Option("--hierarchy", help="measure each level of the memory hierarchy instead")
    ] = False,
) -> None:
    """Measure the peak rates of this machine."""
    from ..distributed import bandwidth
    from ..tools import roofline, stored_results
    from ..util.device import Machine

    if hierarchy:
        if store:
            raise typer.BadParameter("--hierarchy stores nothing: leave out --store")
        here = Machine.here()
        with show_progress() as progress:
            levels = roofline.measure_hierarchy(here, progress)
        stored = stored_results.stored_peaks(baselines, here.product)
        finish(roofline.hierarchy_result(here.product, levels, stored=stored, as_json=as_json))
    if store:
        bandwidth.refuse_under_ci()
    with show_progress() as progress:
        peaks = roofline.measure_peaks(Machine.here(), progress)
    result = roofline.peak_result(peaks, as_json=as_json)
    if store:
        result = store_measured(result, lambda: roofline.store_peaks(peaks, baselines))
    finish(result)


def doctor(
    as_json: Json = False,
    script: Annotated[
        bool, typer.Option("--fix-script", help="print a shell script with the fixes; run nothing")
    ] = False,
) -> None:
    """Find what disturbs measurements on this machine."""
    from ..tools import doctor

    found = doctor.examine()
    finish(doctor.fix_script(found) if script else doctor.doctor_result(found, as_json=as_json))


def clean(yes: Yes = False, as_json: Json = False) -> None:
    """List files that runs left behind, and remove them with --yes."""
    from ..tools import catalog, maintenance

    with show_progress() as progress:
        pages = catalog.collect((), tell=progress)
    finish(maintenance.clean_result(pages, yes=yes, as_json=as_json))


def topology(as_json: Json = False) -> None:
    """Show GPUs, their links, NUMA nodes and peer access."""
    from ..distributed import topology

    finish(topology.topology_result(as_json=as_json))


def bandwidth(
    size: Annotated[
        str, typer.Option(metavar="SIZE", help="bytes to copy, such as 256MiB")
    ] = "1GiB",
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
    with show_progress() as progress:
        count, hops = bandwidth.measure_visible_gpus(nbytes, progress)
    result = bandwidth.bandwidth_result(hops, nbytes, as_json=as_json)
    if store:
        result = store_measured(
            result,
            lambda: bandwidth.store_peaks(
                baselines, Machine.here(), count, *bandwidth.peer_peaks(hops, nbytes)
            ),
        )
    finish(result)


def nccl(
    ops: Annotated[
        str, typer.Option(metavar="OPS", help="collectives, separated by commas")
    ] = ",".join(OPS),
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="a range of powers of two, such as 4KiB:512MiB, or a list, such as 4KiB,1MiB;"
            f" default: {SIZES['cuda']}, on CPUs {SIZES['cpu']}",
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="default: one per GPU, or two on a CPU")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="draw the bus bandwidth by size")
    ] = None,
    timeout: Timeout = 120.0,
    store: Store = False,
    baselines: Baselines = DEFAULT_BASELINES,
) -> None:
    """Measure NCCL collectives by size."""
    from ..distributed import bandwidth, nccl
    from ..distributed.plot import draw
    from ..util.device import Machine

    chosen_ops = parse_option("--ops", nccl.parse_ops, ops)
    chosen_sizes = None if sizes is None else parse_option("--sizes", parse_sizes, sizes)
    if store:
        bandwidth.refuse_under_ci()
    machine = Machine.here()
    device, _ = nccl.choose_ranks(machine, ranks)
    with show_progress() as progress:
        sweep = nccl.measure_collectives(
            machine,
            chosen_ops,
            chosen_sizes or parse_sizes(SIZES[device]),
            ranks=ranks,
            timeout=timeout,
            progress=progress,
        )
    result = nccl.nccl_result(sweep)
    if plot is not None:
        result = _write_plot(result, plot, draw(sweep.rows, sweep.title))
    if store:
        result = store_measured(
            result,
            lambda: bandwidth.store_peaks(
                baselines, machine, sweep.ranks, *nccl.collective_peaks(sweep)
            ),
        )
    finish(result)


def _write_plot(result: CliResult, path: Path, svg: str) -> CliResult:
    """Write the plot. If that fails, return the table with exit code 2."""
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        print_error(f"--plot={path}: cannot be written: {error}")
        return replace(result, code=2)
    return replace(result, lines=[*result.lines, f"drawn in {path}"])


def diagnose(
    case: Annotated[
        str | None,
        typer.Argument(metavar="CASE", help="pytest id; default: a loop of all-reduces"),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="ranks of the loop; default: one per GPU")
    ] = None,
    as_json: Json = False,
    timeout: Timeout = 120.0,
) -> None:
    """Find out why collectives are slow: a late rank, contention, or a chain of ranks."""
    from ..distributed import slow_collectives
    from ..results.messages import DiagnoseTask
    from ..tools import catalog
    from ..util.device import Machine

    if case is not None and ranks is not None:
        raise typer.BadParameter("--ranks is for the loop; a case has its own number of ranks")
    task = DiagnoseTask()
    with show_progress() as progress:
        if case is not None:
            found, root = catalog.find_case(case, progress)
            task = DiagnoseTask(
                page=str(root / found.path),
                root=str(root),
                module=".".join(Path(found.path).with_suffix("").parts),
                function=found.function,
                variant=found.variant,
                case=found.nodeid,
                size=found.size,
                gpus=found.gpus,
            )
        arrivals, title = slow_collectives.record(
            Machine.here(), task, ranks=ranks, timeout=timeout, progress=progress
        )
    finish(slow_collectives.diagnose_result(arrivals, title, as_json=as_json))


def nccl_env() -> None:
    """Show and explain the NCCL variables that are set."""
    from ..distributed import nccl

    finish(nccl.nccl_env_result(os.environ, nccl.nccl_version()))


def fleet_start(
    head: Head = False,
    address: Address = None,
    block: Block = False,
    simulated_gpus: Gpus = 0,
    show: Show = False,
) -> None:
    """Start Ray on this machine with the options that a fleet needs."""
    from ..fleet.probe import probe
    from ..fleet.start import start_command, start_result

    command = start_command(probe(), head=head, address=address, gpus=simulated_gpus, block=block)
    finish(start_result(command, show=show))


def fleet_resume(address: Address = None) -> None:
    """Continue the fleet run that was interrupted in this folder."""
    from ..fleet.start import resume

    raise typer.Exit(resume(Path.cwd(), address))


def fleet_boards(product: Only = None, baselines: Baselines = DEFAULT_BASELINES) -> None:
    """Compare the stored results of different boards (GPUs) of the same product."""
    from ..fleet.boards import boards_result

    finish(boards_result(baselines, product))


def bottleneck(
    script: Annotated[Path, typer.Argument(help="the training script")],
    arguments: Annotated[list[str] | None, typer.Argument(help="arguments of the script")] = None,
    as_json: Json = False,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="end the script after N timed steps")
    ] = None,
    warmup: Annotated[int, typer.Option(metavar="N", min=0, help="first steps to leave out")] = 5,
    profiled: Annotated[
        int, typer.Option(metavar="N", min=1, help="steps to profile on a GPU")
    ] = 10,
) -> None:
    """Run a training script and show what its steps wait for."""
    from ..training_loop.loop import Plan
    from ..training_loop.watch import bottleneck_result

    plan = Plan(warmup, profiled, steps)
    finish(bottleneck_result(script, arguments or [], plan=plan, as_json=as_json))
