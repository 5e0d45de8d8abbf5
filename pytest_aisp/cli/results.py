"""`aisp roofline | expectations | prune | compare | seals`: what stored results and runs say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import HERE, Baselines, Json, Yes, finish, one_of, telling
from .suite import Several, Targets

Product = Annotated[
    str | None,
    typer.Option(metavar="PRODUCT", help="default: this machine's, else the only one stored"),
]


def add_stored_commands(app: typer.Typer) -> None:
    """Add the commands of this module to `app`."""
    app.command(cls=Several)(roofline)
    app.command()(expectations)
    app.command()(prune)
    app.command()(compare)
    app.command()(seals)


def roofline(targets: Targets = None, product: Product = None, as_json: Json = False) -> None:
    """Hold stored results against the measured peaks."""
    from ..tools import catalog, roofline, stored_results
    from ..util.device import Machine

    with telling() as tell:
        found = catalog.collect(targets, tell=tell)
    names = stored_results.chosen(found.baselines, product, Machine.here())
    finish(roofline.roofline_result(found, names, targets or (), as_json=as_json))


def expectations(
    product: Product = None,
    form: Annotated[
        str, typer.Option("--format", metavar="text|csv|json", help="how it is printed")
    ] = "text",
    arch: Annotated[
        str | None, typer.Option(metavar="ARCH", help="whose claims count, as sm90")
    ] = None,
) -> None:
    """Hold stored results against what pages claim."""
    from ..tools import catalog, expectations, stored_results
    from ..util.device import Machine

    wanted, machine = one_of(expectations.FORMATS, "--format", form), Machine.here()
    with telling() as tell:
        found = catalog.collect(tell=tell)
    names = stored_results.chosen(found.baselines, product, machine)
    archs = {name: stored_results.arch_of(name, arch, machine) for name in names}
    finish(expectations.expectations_result(found, archs, form=wanted))


def prune(
    product: Annotated[
        str | None, typer.Option(metavar="PRODUCT", help="default: every one")
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """List stored results whose case is gone."""
    from ..tools import catalog, cleanup

    with telling() as tell:
        found = catalog.collect(tell=tell)
    finish(cleanup.prune_result(found, product, yes=yes, as_json=as_json))


def compare(
    old: Annotated[str, typer.Argument(help="a run's folder, one of stored results, or a commit")],
    new: Annotated[str, typer.Argument(help="likewise")],
    form: Annotated[
        str, typer.Option("--format", metavar="text|markdown|json", help="how it is printed")
    ] = "text",
    every: Annotated[
        bool, typer.Option("--all", help="also what is within its noise; json always has it")
    ] = False,
) -> None:
    """Compare two runs, or the stored results of two commits: what changed, the worst first."""
    from ..tools import compare_results

    wanted = one_of(compare_results.FORMS, "--format", form)
    finish(compare_results.compare_result(old, new, form=wanted, every=every, root=Path.cwd()))


def seals(
    files: Annotated[
        list[Path] | None, typer.Argument(help="default: those that differ from REF")
    ] = None,
    against: Annotated[
        str, typer.Option(metavar="REF", help="the commit before, as origin/main")
    ] = "HEAD",
    baselines: Baselines = HERE,
) -> None:
    """Refuse staged results that no run has recorded."""
    from ..tools import stored_results

    finish(stored_results.checksums_result(files or (), baselines, against))


def add_folder_commands(app: typer.Typer) -> None:
    """Add the commands of this module to `app`."""
    app.command()(export)
    app.command()(gate)


def export(
    folder: Annotated[Path, typer.Argument(help="what --aisp-artifacts wrote")],
) -> None:
    """Print a run's timed sides as a file of pytest-benchmark."""
    from ..session import benchmark_plugin

    finish(benchmark_plugin.export_result(folder))


def gate(
    folders: Annotated[list[Path], typer.Argument(help="what --aisp-artifacts wrote, each")],
    products: Annotated[
        str, typer.Option(metavar="P,P", help="those that are to be there, as nvidia-h200")
    ] = "",
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="text|markdown|github|gitlab|json",
            help="github: annotations; gitlab: a Code Quality report",
        ),
    ] = "text",
) -> None:
    """Give the runs of several machines one verdict."""
    from ..tools import gate

    wanted = one_of(gate.FORMS, "--format", form)
    expected = [product for product in products.split(",") if product]
    finish(gate.gate_result(folders, expected, form=wanted, root=Path()))
