"""`aisp bench | verify | replay`: runs of pytest, shown as commands; and `aisp report`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ..util.cli_result import CliError
from .console import Json, finish, one_of, say, telling

if TYPE_CHECKING:
    from ..tools.catalog import Catalog


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
    from ..tools import catalog

    with telling() as tell:
        found = catalog.collect(None if chapter is None else [chapter], tell=tell)
    finish(catalog.list_targets_result(found, as_json=as_json))


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
    from ..tools import catalog

    wanted = one_of(catalog.PROFILES, "--profile", profile)
    commands = catalog.measuring(_paths(targets), wanted, artifacts_dir, rest(ctx))
    raise typer.Exit(catalog.worst(commands, say))


def verify(ctx: typer.Context, targets: Targets = None) -> None:
    """Collect, check and compile pages: no timing.

    What stands behind -- goes to pytest.
    """
    from ..tools import catalog

    raise typer.Exit(catalog.worst(catalog.verifying(_paths(targets), rest(ctx)), say))


def replay(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(help="what --aisp-artifacts wrote")],
    targets: Targets = None,
) -> None:
    """Judge recorded samples again.

    What stands behind -- goes to pytest.
    """
    from ..tools import catalog

    found = _named(targets)
    pages = found.chosen(targets) if targets else ()
    raise typer.Exit(catalog.run(catalog.replaying(folder, found.root, pages, rest(ctx)), say))


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

    finish(write.report_result(folder, history or (), out, pages))


def _paths(targets: list[str] | None) -> list[str]:
    return _named(targets).paths(targets or ())


def _named(targets: list[str] | None) -> Catalog:
    """Return the pages here by name; none is imported for it, and `targets` are among them."""
    from ..tools import catalog

    with telling() as tell:
        found = catalog.collect((), tell=tell)
    found.known(targets or ())
    return found


OPTION = "--targets"
REST, GIVEN = "pytest_aisp.rest", "pytest_aisp.given"
"""Where a command's context keeps what stands behind ``--``, and which targets stand last."""


def complete(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return how a shell could complete a target: chapters, and the pages of one written whole.

    bash takes `ch10:ge` for three words and replaces the last.
    """
    words = list(ctx.meta.get(GIVEN) or ())
    begun = f"{words[-2]}:" if words[1:] and words[-1] == ":" else ""
    return [
        name.removeprefix(begun)
        for name in _names(begun + incomplete)
        if begun or name not in words
    ]


def _names(incomplete: str) -> list[str]:
    from ..tools import catalog

    try:
        pages = catalog.collect(()).pages
    except CliError:  # a shell that completes has no use for the reason
        return []
    chapters = sorted({page["chapter"] for page in pages})
    names = [page["name"] for page in pages if page["chapter"] == incomplete.partition(":")[0]]
    return [name for name in [*chapters, *names] if name.startswith(incomplete)]


Targets = Annotated[
    list[str] | None,
    typer.Option(
        OPTION,
        metavar="TARGET ...",
        help="chapters (ch10) and pages (ch10:gemm); default: all",
        autocompletion=complete,
    ),
]


class Several(TyperCommand):
    """A command whose `--targets` takes words up to the next option."""

    passes = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give Typer one option a word, which is all that it knows."""
        ours, dashes, rest = _split(args)
        if dashes and not self.passes:
            ctx.fail("nothing goes from here to pytest: leave out -- and what stands behind it")
        ctx.meta[REST] = rest
        words = list(_one_each(ours))
        if ctx.resilient_parsing:  # a shell completes: what it has so far may lack a word
            ctx.meta[GIVEN] = None if dashes else _last_given(ours)
            words = [word for word in words if word != OPTION]
        if OPTION in words:
            ctx.fail(f"{OPTION} needs a chapter or a page, as ch10 or ch10:gemm")
        return super().parse_args(ctx, words)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete the second target and those after it, as Typer does the first."""
        if ctx.meta.get(GIVEN) is None or incomplete.startswith("-"):
            return list(super().shell_complete(ctx, incomplete))
        if incomplete == ":":
            ctx.meta[GIVEN].append(incomplete)
            incomplete = ""
        option = next(param for param in self.get_params(ctx) if OPTION in param.opts)
        return list(option.shell_complete(ctx, incomplete))


class Passing(Several):
    """One that also hands to pytest what stands behind ``--``."""

    passes = True


def _split(args: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in args:
        return list(args), False, []
    at = args.index("--")
    return list(args[:at]), True, list(args[at + 1 :])


def _one_each(args: Sequence[str]) -> Iterator[str]:
    """Yield ``--targets=a --targets=b`` for ``--targets a b``; itself where no word follows."""
    pending, inside = False, False
    for word in [*args, "--"]:  # which ends every option
        if inside and not word.startswith("-"):
            yield f"{OPTION}={word}"
            pending = False
            continue
        if pending:
            yield OPTION
        pending = inside = word == OPTION
        inside |= word.startswith(f"{OPTION}=")
        if not pending and word != "--":
            yield word


def _last_given(args: Sequence[str]) -> list[str] | None:
    """Return the targets at the end of `args`, or None where another option stands there."""
    words: list[str] = []
    for word in reversed(args):
        if not word.startswith("-"):
            words.insert(0, word)
            continue
        option, equals, first = word.partition("=")
        return ([first] if equals else []) + words if option == OPTION else None
    return None


def rest(ctx: typer.Context) -> list[str]:
    """Return what stands behind ``--`` on the command line."""
    return list(ctx.meta[REST])
