"""`aisp results ...` and `aisp ci gate`: what runs and stored results show."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import DEFAULT_BASELINES, Baselines, Json, Yes, finish, one_of, show_progress
from .suite import Targets

Product = Annotated[
    str | None,
    typer.Option(metavar="PRODUCT", help="default: this machine's product, or the only one stored"),
]


def roofline(targets: Targets = None, product: Product = None, as_json: Json = False) -> None:
    """Compare stored results with the peak rates of their machine."""
    from ..tools import catalog, roofline, stored_results
    from ..util.device import Machine

    with show_progress() as tell:
        found = catalog.collect(targets, tell=tell)
    names = stored_results.select_products(found.baselines, product, Machine.here())
    finish(roofline.roofline_result(found, names, targets or (), as_json=as_json))


def expectations(
    product: Product = None,
    form: Annotated[
        str, typer.Option("--format", metavar="text|csv|json", help="output format")
    ] = "text",
    arch: Annotated[
        str | None, typer.Option(metavar="ARCH", help="the arch whose claims count, as sm90")
    ] = None,
) -> None:
    """Compare stored results with the claims of their pages."""
    from ..tools import catalog, stored_results
    from ..util.device import Machine

    wanted, machine = one_of(stored_results.FORMATS, "--format", form), Machine.here()
    with show_progress() as tell:
        found = catalog.collect(tell=tell)
    names = stored_results.select_products(found.baselines, product, machine)
    archs = {name: stored_results.arch_of(name, arch, machine) for name in names}
    finish(stored_results.expectations_result(found, archs, form=wanted))


def prune(
    product: Annotated[
        str | None, typer.Option(metavar="PRODUCT", help="default: all products")
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """List stored results whose case no longer exists."""
    from ..tools import catalog, maintenance

    with show_progress() as tell:
        found = catalog.collect(tell=tell)
    finish(maintenance.prune_result(found, product, yes=yes, as_json=as_json))


def compare(
    old: Annotated[str, typer.Argument(help="a run, a folder of stored results, or a commit")],
    new: Annotated[str, typer.Argument(help="the same")],
    form: Annotated[
        str, typer.Option("--format", metavar="text|markdown|json", help="output format")
    ] = "text",
    every: Annotated[
        bool, typer.Option("--all", help="also list changes within the noise; json always does")
    ] = False,
) -> None:
    """Compare two runs or commits, the worst change first."""
    from ..tools import compare_results

    wanted = one_of(compare_results.FORMS, "--format", form)
    finish(compare_results.compare_result(old, new, form=wanted, every=every, root=Path.cwd()))


def checksums(
    files: Annotated[
        list[Path] | None, typer.Argument(help="default: all that differ from REF")
    ] = None,
    against: Annotated[
        str, typer.Option(metavar="REF", help="the commit to compare with, as origin/main")
    ] = "HEAD",
    baselines: Baselines = DEFAULT_BASELINES,
) -> None:
    """Refuse staged results that no run recorded."""
    from ..tools import maintenance

    finish(maintenance.checksums_result(files or (), baselines, against))


def report(
    folder: Annotated[Path, typer.Argument(help="the folder that --aisp-artifacts wrote")],
    history: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="an earlier run, for the history of cases; repeatable"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="default: report.html in FOLDER")
    ] = None,
    pages: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="folder of the pages; default: the root of the run"),
    ] = None,
) -> None:
    """Write a run as one HTML file."""
    from ..report.html import report_result

    finish(report_result(folder, history or (), out, pages))


def export(
    folder: Annotated[Path, typer.Argument(help="the folder that --aisp-artifacts wrote")],
) -> None:
    """Print the timed sides of a run as JSON of pytest-benchmark."""
    from ..session import benchmark_plugin

    finish(benchmark_plugin.export_result(folder))


def gate(
    folders: Annotated[list[Path], typer.Argument(help="folders that --aisp-artifacts wrote")],
    products: Annotated[
        str, typer.Option(metavar="P,P", help="products that must be there, as nvidia-h200")
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
