"""`aisp suite`: find pages, and run pytest on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from ..util.cli_result import CliError, CliResult
from .console import Json, Product, finish, print_line, show_progress

if TYPE_CHECKING:
    from ..tools.catalog import Catalog

OPTION = "--targets"
PYTEST_ARGUMENTS = "pytest_aisp.pytest_arguments"
"""The key in a command's context for the arguments after ``--``."""
LAST_TARGETS = "pytest_aisp.last_targets"
"""The key in a command's context for the targets at the end of the command line. The key is set
only during shell completion."""


def complete_target(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return completions of a target: chapters, or the pages of a fully typed chapter.

    bash splits `ch10:ge` into the words `ch10`, `:` and `ge`, and replaces only the last one.
    """
    words = list(ctx.meta.get(LAST_TARGETS) or ())
    prefix = f"{words[-2]}:" if words[1:] and words[-1] == ":" else ""
    return [
        name.removeprefix(prefix)
        for name in _target_names(prefix + incomplete)
        if prefix or name not in words
    ]


Folder = Annotated[Path, typer.Argument(help="folder that --aisp-artifacts wrote")]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        OPTION,
        metavar="TARGET ...",
        help="chapters (ch10) and pages (ch10:gemm); default: all",
        autocompletion=complete_target,
    ),
]


def list_pages(
    chapter: Annotated[
        str | None,
        typer.Option(metavar="CHAPTER", help="list only this chapter's pages, such as ch10"),
    ] = None,
    as_json: Json = False,
) -> None:
    """List pages with their variants, bounds, needs and archs."""
    from ..tools import catalog

    with show_progress() as progress:
        pages = catalog.collect(None if chapter is None else [chapter], tell=progress)
    finish(catalog.list_targets_result(pages, as_json=as_json))


def show(
    page: Annotated[str, typer.Argument(metavar="PAGE", autocompletion=complete_target)],
    product: Product = None,
) -> None:
    """Show a page: its text, the predicted and stored times of its sides, and code diffs."""
    from ..report import source_view
    from ..tools import catalog, predictions, stored_results
    from ..util.device import Machine

    with show_progress() as progress:
        pages = catalog.collect([page], tell=progress)
    [*others, path] = pages.pages_of([page])
    if others:
        raise CliError(
            f"{page!r} has several pages; name one\n    aisp suite list --chapter={page}"
        )
    shown = source_view.Page.read(pages.root / path)
    lines = shown.doc.splitlines()
    lines += [f"{each.path} was not read: {each.text}" for each in pages.unread]
    try:
        if product is not None and predictions.has_only_data_sheet(pages.baselines, product):
            lines += ["", *predictions.data_sheet_result(pages, product, as_json=False).lines]
        else:
            products = stored_results.select_products(pages.baselines, product, Machine.here())
            lines += predictions.page_tables(pages, products)
    except CliError as error:
        lines += ["", *str(error).splitlines()]
    finish(CliResult([*lines, *source_view.page_diffs(shown)]))


def changed(
    ref: Annotated[str, typer.Argument(metavar="REF", help="a commit, such as origin/main")],
) -> None:
    """Print the cases whose results may have changed since the commit REF, one per line."""
    from ..tools.changed_cases import changed_result

    pages = _read_catalog(None)
    with show_progress() as progress:
        result = changed_result(pages, ref, tell=progress)
    finish(result)


def bisect(
    case: Annotated[
        str,
        typer.Argument(metavar="CASE", help="a pytest id, such as ch10/x_test.py::test_x[a-n8]"),
    ],
    good: Annotated[str, typer.Option(metavar="REF", help="a commit where it was fast")],
    bad: Annotated[str, typer.Option(metavar="REF", help="a commit where it is slow")] = "HEAD",
) -> None:
    """Find the commits that made a case slower, with the code gate.

    Measurements are kept after Ctrl-C. Run the same command again to continue.
    """
    import signal

    from ..tools.bisect import bisect_result

    # Slurm sends SIGTERM. Then the worktree must be removed too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with show_progress() as progress:
        result = bisect_result(case, good, bad, tell=progress, say=print_line)
    finish(result)


def run(
    ctx: typer.Context,
    targets: Targets = None,
    profile: Annotated[
        Literal["none", "minimal", "full"],
        typer.Option(help="minimal: torch's profiler; full: also nsys and ncu, in separate runs"),
    ] = "none",
    artifacts_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="write rows, samples and profiles here")
    ] = None,
) -> None:
    """Measure pages with pytest.

    Prints each pytest command. Arguments after -- go to pytest.
    """
    from ..tools import catalog

    paths = _read_catalog(targets).paths(targets or ())
    commands = catalog.measure_commands(paths, profile, artifacts_dir, pytest_arguments(ctx))
    raise typer.Exit(catalog.run_all(commands, print_line))


def verify(ctx: typer.Context, targets: Targets = None) -> None:
    """Collect, check and compile pages without timing them.

    Prints each pytest command. Arguments after -- go to pytest.
    """
    from ..tools import catalog

    paths = _read_catalog(targets).paths(targets or ())
    commands = catalog.verify_commands(paths, pytest_arguments(ctx))
    raise typer.Exit(catalog.run_all(commands, print_line))


def replay(ctx: typer.Context, folder: Folder, targets: Targets = None) -> None:
    """Judge the recorded samples of a run again.

    Prints the pytest command. Arguments after -- go to pytest.
    """
    from ..tools import catalog

    pages = _read_catalog(targets)
    paths = pages.pages_of(targets) if targets else ()
    command = catalog.replay_command(folder, pages.root, paths, pytest_arguments(ctx))
    raise typer.Exit(catalog.run(command, print_line))


def _read_catalog(targets: list[str] | None) -> Catalog:
    """Return the catalog without importing any page. Raise `CliError` for an unknown target."""
    from ..tools import catalog

    with show_progress() as progress:
        pages = catalog.collect((), tell=progress)
    pages.check_targets(targets or ())
    return pages


def _target_names(incomplete: str) -> list[str]:
    from ..tools import catalog

    try:
        pages = catalog.collect(()).pages
    except CliError:  # shell completion cannot show an error
        return []
    chapters = sorted({page.chapter for page in pages})
    names = [page.name for page in pages if page.chapter == incomplete.partition(":")[0]]
    return [name for name in [*chapters, *names] if name.startswith(incomplete)]


class TargetsCommand(TyperCommand):
    """A command whose `--targets` takes all words up to the next option.

    The argument `ctx` of the methods is a context of click, or of the copy of click in newer
    versions of Typer.
    """

    takes_pytest_arguments = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat `--targets` before each of its words, because Typer takes one word per option."""
        end = args.index("--") if "--" in args else len(args)
        own, has_dashes = args[:end], end < len(args)
        if has_dashes and not self.takes_pytest_arguments:
            ctx.fail("this command does not run pytest: remove -- and the words after it")
        ctx.meta[PYTEST_ARGUMENTS] = args[end + 1 :]
        words = list(_repeat_option(own))
        if ctx.resilient_parsing:  # the shell is completing an unfinished line
            ctx.meta[LAST_TARGETS] = None if has_dashes else _last_targets(own)
            words = [word for word in words if word != OPTION]
        if OPTION in words:
            ctx.fail(f"{OPTION} needs a chapter or a page, such as ch10 or ch10:gemm")
        return super().parse_args(ctx, words)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete a target at any position. Typer itself completes only the first target."""
        if ctx.meta.get(LAST_TARGETS) is None or incomplete.startswith("-"):
            return list(super().shell_complete(ctx, incomplete))
        if incomplete == ":":
            ctx.meta[LAST_TARGETS].append(incomplete)
            incomplete = ""
        option = next(param for param in self.get_params(ctx) if OPTION in param.opts)
        return list(option.shell_complete(ctx, incomplete))


class PytestCommand(TargetsCommand):
    """A command that also passes the arguments after ``--`` to pytest."""

    takes_pytest_arguments = True


def _repeat_option(args: Sequence[str]) -> Iterator[str]:
    """Yield ``--targets=a --targets=b`` for ``--targets a b``.

    A ``--targets`` without words is kept.
    """
    in_targets = has_word = False
    for word in [*args, "--"]:  # the added "--" ends the last option
        if in_targets and not word.startswith("-"):
            yield f"{OPTION}={word}"
            has_word = True
            continue
        if in_targets and not has_word:
            yield OPTION
        has_word = word.startswith(f"{OPTION}=")
        in_targets = has_word or word == OPTION
        if word not in (OPTION, "--"):
            yield word


def _last_targets(args: Sequence[str]) -> list[str] | None:
    """Return the targets at the end of `args`, or None if the last option is not `--targets`."""
    words: list[str] = []
    for word in reversed(args):
        if not word.startswith("-"):
            words.insert(0, word)
            continue
        option, equals, first = word.partition("=")
        return ([first] if equals else []) + words if option == OPTION else None
    return None


def pytest_arguments(ctx: typer.Context) -> list[str]:
    """Return the arguments after ``--`` on the command line."""
    return list(ctx.meta[PYTEST_ARGUMENTS])
