"""`aisp bench | verify | replay`: runs of pytest, shown as commands; and `aisp report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import Json, finish, one_of, say, telling
from .several import Passing, Targets, rest

if TYPE_CHECKING:
    from ..tools.catalogue import Catalogue


def add_to(app: typer.Typer) -> None:
    """Add the commands of this module to `app`."""
    bench = typer.Typer(
        help="List pages, and measure them with pytest.",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    bench.command("list-targets")(list_targets)
    bench.command("run", cls=Passing)(run)
    app.add_typer(bench, name="bench")
    app.command(cls=Passing)(verify)
    app.command(cls=Passing)(replay)
    app.command()(report)


def list_targets(
    chapter: Annotated[
        str | None, typer.Option(metavar="CHAPTER", help="only its pages, as ch10")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the pages that can be run, with their variants, bounds, needs and archs."""
    from ..tools import catalogue, listing

    with telling() as tell:
        found = catalogue.collect(None if chapter is None else [chapter], tell=tell)
    finish(listing.answer(found, as_json=as_json))


def run(
    ctx: typer.Context,
    targets: Targets = None,
    profile: Annotated[
        str,
        typer.Option(
            metavar="none|minimal|full",
            help="minimal: torch's profiler; full: nsys and ncu too, in runs of their own",
        ),
    ] = "none",
    artifacts_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="keep rows, samples and profiles here")
    ] = None,
) -> None:
    """Measure pages with pytest.

    The command is shown first; what stands behind -- goes to pytest.
    """
    from ..tools import pytest_runs

    wanted = one_of(pytest_runs.PROFILES, "--profile", profile)
    commands = pytest_runs.measuring(_paths(targets), wanted, artifacts_dir, rest(ctx))
    raise typer.Exit(pytest_runs.worst(commands, say))


def verify(ctx: typer.Context, targets: Targets = None) -> None:
    """Collect, check and compile pages: no timing.

    What stands behind -- goes to pytest.
    """
    from ..tools import pytest_runs

    raise typer.Exit(pytest_runs.worst(pytest_runs.verifying(_paths(targets), rest(ctx)), say))


def replay(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(help="what --aisp-artifacts wrote")],
    targets: Targets = None,
) -> None:
    """Judge recorded samples again.

    What stands behind -- goes to pytest.
    """
    from ..tools import pytest_runs

    found = _named(targets)
    pages = found.chosen(targets) if targets else ()
    raise typer.Exit(
        pytest_runs.run(pytest_runs.replaying(folder, found.root, pages, rest(ctx)), say)
    )


def report(
    folder: Annotated[Path, typer.Argument(help="what --aisp-artifacts wrote")],
    history: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="another run, for each case's history; repeatable"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="default: report.html in FOLDER")
    ] = None,
    pages: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="where the pages lie; default: the run's root"),
    ] = None,
) -> None:
    """Write a run as one HTML file to look at."""
    from ..report import write

    finish(write.answer(folder, history or (), out, pages))


def _paths(targets: list[str] | None) -> list[str]:
    return _named(targets).paths(targets or ())


def _named(targets: list[str] | None) -> Catalogue:
    """Return the pages here by name; none is imported for it, and `targets` are among them."""
    from ..tools import catalogue

    with telling() as tell:
        found = catalogue.collect((), tell=tell)
    found.known(targets or ())
    return found
