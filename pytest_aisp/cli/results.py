"""`aisp results ...` and `aisp ci gate`: evaluate runs and stored results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..util.cli_result import CliError
from .console import (
    DEFAULT_BASELINES,
    Baselines,
    Json,
    Product,
    Yes,
    finish,
    print_error,
    show_progress,
    store_measured,
)
from .suite import Folder, Targets

Reference = Annotated[
    str, typer.Argument(help="a run's folder, a folder of stored results, or a commit")
]


def roofline(targets: Targets = None, product: Product = None, as_json: Json = False) -> None:
    """Compare stored results with the peak rates of their machine."""
    from ..tools import catalog, roofline, stored_results
    from ..util.device import Machine

    with show_progress() as progress:
        pages = catalog.collect(targets, tell=progress)
    products = stored_results.select_products(pages.baselines, product, Machine.here())
    finish(roofline.roofline_result(pages, products, targets or (), as_json=as_json))


def expectations(
    product: Product = None,
    form: Annotated[
        Literal["text", "csv", "json"], typer.Option("--format", help="output format")
    ] = "text",
    arch: Annotated[
        str | None,
        typer.Option(
            metavar="ARCH",
            help="use the claims for this arch, such as sm90; default: the product's arch",
        ),
    ] = None,
) -> None:
    """Compare stored results with the claims of their pages."""
    from ..tools import catalog, expectations, stored_results
    from ..util.device import Machine

    machine = Machine.here()
    with show_progress() as progress:
        pages = catalog.collect(tell=progress)
    products = stored_results.select_products(pages.baselines, product, machine)
    archs = {name: stored_results.arch_of(name, arch, machine) for name in products}
    finish(expectations.expectations_result(pages, archs, form=form))


def predictions(
    targets: Targets = None,
    product: Annotated[
        str | None,
        typer.Option(
            metavar="PRODUCT",
            help="default: this machine's product, or the only one stored; for a product without"
            " results, such as nvidia-b200, times are predicted from its data sheet",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare stored times with the times predicted from the sides' costs."""
    from ..tools import catalog, predictions, stored_results
    from ..util.device import Machine

    with show_progress() as progress:
        pages = catalog.collect(targets, tell=progress)
    if product and predictions.has_only_data_sheet(pages.baselines, product):
        finish(predictions.data_sheet_result(pages, product, as_json=as_json))
    products = stored_results.select_products(pages.baselines, product, Machine.here())
    finish(predictions.predictions_result(pages, products, as_json=as_json))


def prune(
    product: Annotated[
        str | None, typer.Option(metavar="PRODUCT", help="default: all products")
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """List stored results whose case no longer exists, and remove them with --yes."""
    from ..tools import catalog, maintenance

    with show_progress() as progress:
        pages = catalog.collect(tell=progress)
    finish(maintenance.prune_result(pages, product, yes=yes, as_json=as_json))


def compare(
    old: Reference,
    new: Reference,
    form: Annotated[
        Literal["text", "markdown", "json"], typer.Option("--format", help="output format")
    ] = "text",
    every: Annotated[
        bool, typer.Option("--all", help="also list changes within the noise; json always does")
    ] = False,
) -> None:
    """Compare two runs or commits, the worst change first."""
    from ..tools import compare_results

    finish(compare_results.compare_result(old, new, form=form, every=every, root=Path.cwd()))


def checksums(
    files: Annotated[
        list[Path] | None, typer.Argument(help="default: all that differ from REF")
    ] = None,
    against: Annotated[
        str, typer.Option(metavar="REF", help="commit to compare with, such as origin/main")
    ] = "HEAD",
    baselines: Baselines = DEFAULT_BASELINES,
    artifacts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER", help="compare with the run that recorded the results; repeatable"
        ),
    ] = None,
) -> None:
    """Find stored results that were edited by hand, or that differ from their run."""
    from ..tools import checksums

    finish(checksums.checksums_result(files or (), baselines, against, artifacts or ()))


def report(
    folder: Folder,
    history: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="an earlier run, or a folder of `aisp results history`; repeatable",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="default: report.html in the folder")
    ] = None,
    pages: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="folder of the pages; default: the root of the run"),
    ] = None,
    hierarchy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="the output of aisp machine peak --hierarchy --json"),
    ] = None,
) -> None:
    """Write a run as one HTML file."""
    from ..report.html import report_result

    finish(report_result(folder, history or (), out, pages, hierarchy))


def history(
    folder: Annotated[Path, typer.Argument(metavar="HISTORY", help="the folder of the history")],
    add: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN", help="add the run in this folder, and list nothing; repeatable"
        ),
    ] = None,
    case: Annotated[
        str, typer.Option(metavar="TEXT", help="list only cases that contain this text")
    ] = "",
    confirm: Annotated[
        bool,
        typer.Option(
            "--confirm",
            help="first run the code gate over the two commits of each unconfirmed change, and add"
            " the runs",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show how the speedup of each case changed over runs."""
    from ..tools import history_changes

    if add and confirm:
        raise CliError("--add lists nothing; use --confirm in a second command")
    if add:
        finish(history_changes.add_result(add, folder))
    failed = 0
    if confirm:
        import signal

        from ..tools import confirm_changes

        # Slurm sends SIGTERM. Then the worktree must be removed too.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with show_progress() as progress:
            failed = confirm_changes.confirm(folder, case, tell=progress, say=print_error)
    result = history_changes.history_result(folder, case=case, as_json=as_json)
    finish(replace(result, code=1) if failed else result)


def export(folder: Folder) -> None:
    """Print the timed sides of a run as pytest-benchmark JSON."""
    from ..session import benchmark_plugin

    finish(benchmark_plugin.export_result(folder))


def gate(
    folders: Annotated[list[Path], typer.Argument(help="folders that --aisp-artifacts wrote")],
    products: Annotated[
        str,
        typer.Option(
            metavar="P,P", help="products that must have a run, such as nvidia-h200,nvidia-b200"
        ),
    ] = "",
    form: Annotated[
        Literal["text", "markdown", "github", "gitlab", "json"],
        typer.Option("--format", help="github: annotations; gitlab: a Code Quality report"),
    ] = "text",
    comment: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="write the pull request's comment to this file, and its plot next to it as .svg",
        ),
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="exit with 0 even if the verdict is not green")
    ] = False,
) -> None:
    """Combine the runs of several machines into one verdict."""
    from ..tools import ci_gate, ci_gate_comment, ci_gate_runs

    expected = [product for product in products.split(",") if product]
    found = ci_gate_runs.collect(folders, expected, report_only=report_only)
    result = ci_gate.gate_result(found, form)
    if comment is not None:
        result = store_measured(result, lambda: ci_gate_comment.write(found, comment))
    if found.unreadable:
        raise CliError("\n".join(found.unreadable), found.exit_code)
    finish(result)
