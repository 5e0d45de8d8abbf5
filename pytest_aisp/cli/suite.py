"""`aisp suite list | run | verify | replay`: find pages and run pytest on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ..util.cli_result import CliError
from .console import Json, finish, one_of, say, show_progress

if TYPE_CHECKING:
    from ..tools.catalog import Catalog


def list_pages(
    chapter: Annotated[
        str | None, typer.Option(metavar="CHAPTER", help="only its pages, as ch10")
    ] = None,
    as_json: Json = False,
) -> None:
    """List pages with their variants, bounds, needs and archs."""
    from ..tools import catalog

    with show_progress() as tell:
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

    Prints the pytest command first. Words after -- go to pytest.
    """
    from ..tools import catalog

    wanted = one_of(catalog.PROFILES, "--profile", profile)
    commands = catalog.measure_commands(_paths(targets), wanted, artifacts_dir, rest(ctx))
    raise typer.Exit(catalog.run_all(commands, say))


def verify(ctx: typer.Context, targets: Targets = None) -> None:
    """Collect, check and compile pages without timing them.

    Words after -- go to pytest.
    """
    from ..tools import catalog

    raise typer.Exit(catalog.run_all(catalog.verify_commands(_paths(targets), rest(ctx)), say))


def replay(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(help="the folder that --aisp-artifacts wrote")],
    targets: Targets = None,
) -> None:
    """Judge recorded samples again.

    Words after -- go to pytest.
    """
    from ..tools import catalog

    found = _named(targets)
    pages = found.pages_of(targets) if targets else ()
    raise typer.Exit(catalog.run(catalog.replay_command(folder, found.root, pages, rest(ctx)), say))


def _paths(targets: list[str] | None) -> list[str]:
    return _named(targets).paths(targets or ())


def _named(targets: list[str] | None) -> Catalog:
    """Return the catalog without importing a page; fail if it lacks one of `targets`."""
    from ..tools import catalog

    with show_progress() as tell:
        found = catalog.collect((), tell=tell)
    found.check_targets(targets or ())
    return found


OPTION = "--targets"
REST, GIVEN = "pytest_aisp.rest", "pytest_aisp.given"
"""Keys of a command's context: the words after ``--``, and the targets at the end of a line."""


def complete(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return completions of a target: chapters, and the pages of a chapter that is complete.

    bash splits `ch10:ge` into three words and replaces the last one.
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
    except CliError:  # a completion cannot show the reason
        return []
    chapters = sorted({page.chapter for page in pages})
    names = [page.name for page in pages if page.chapter == incomplete.partition(":")[0]]
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


class TargetsCommand(TyperCommand):
    """A command whose `--targets` takes all words up to the next option."""

    takes_pytest_arguments = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat `--targets` before each of its words, the only form that Typer knows."""
        ours, dashes, rest = _split(args)
        if dashes and not self.takes_pytest_arguments:
            ctx.fail("this command does not run pytest: remove -- and the words after it")
        ctx.meta[REST] = rest
        words = list(_one_each(ours))
        if ctx.resilient_parsing:  # the shell completes a line that is not finished
            ctx.meta[GIVEN] = None if dashes else _last_given(ours)
            words = [word for word in words if word != OPTION]
        if OPTION in words:
            ctx.fail(f"{OPTION} needs a chapter or a page, as ch10 or ch10:gemm")
        return super().parse_args(ctx, words)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete any target; Typer itself completes only the first."""
        if ctx.meta.get(GIVEN) is None or incomplete.startswith("-"):
            return list(super().shell_complete(ctx, incomplete))
        if incomplete == ":":
            ctx.meta[GIVEN].append(incomplete)
            incomplete = ""
        option = next(param for param in self.get_params(ctx) if OPTION in param.opts)
        return list(option.shell_complete(ctx, incomplete))


class PytestCommand(TargetsCommand):
    """A command that also passes the words after ``--`` to pytest."""

    takes_pytest_arguments = True


def _split(args: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in args:
        return list(args), False, []
    at = args.index("--")
    return list(args[:at]), True, list(args[at + 1 :])


def _one_each(args: Sequence[str]) -> Iterator[str]:
    """Yield ``--targets=a --targets=b`` for ``--targets a b``; ``--targets`` if no word follows."""
    pending, inside = False, False
    for word in [*args, "--"]:  # ends the last option
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
    """Return the targets at the end of `args`, or None if the last option is another one."""
    words: list[str] = []
    for word in reversed(args):
        if not word.startswith("-"):
            words.insert(0, word)
            continue
        option, equals, first = word.partition("=")
        return ([first] if equals else []) + words if option == OPTION else None
    return None


def rest(ctx: typer.Context) -> list[str]:
    """Return the words after ``--`` on the command line."""
    return list(ctx.meta[REST])
