"""Common options of the commands, and functions that print results and show progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn, TypeAlias, TypeVar

import typer

from ..util.cli_result import CliError, CliResult, split_progress

T = TypeVar("T")
Progress: TypeAlias = Callable[[str], None]

Json = Annotated[bool, typer.Option("--json", help="print JSON with all details")]
Store = Annotated[
    bool, typer.Option("--store", help="store the rates in BASELINES/<product>/peaks.json")
]
Yes = Annotated[bool, typer.Option("--yes", help="remove everything that is listed")]
Baselines = Annotated[Path, typer.Option(metavar="DIR", help="folder of stored results")]
Product = Annotated[
    str | None,
    typer.Option(metavar="PRODUCT", help="default: this machine's product, or the only one stored"),
]
DEFAULT_BASELINES = Path("baselines")


def finish(result: CliResult) -> NoReturn:
    """Print a result and exit with its code."""
    if result.lines:
        print_line("\n".join(result.lines))
    raise typer.Exit(result.code)


def store_measured(result: CliResult, store: Callable[[], Sequence[str]]) -> CliResult:
    """Call `store`, print the returned lines on stderr, and return `result`.

    If `store` fails, the returned result has the exit code of the error.
    """
    try:
        print_error("\n".join(store()))
    except CliError as error:
        print_error(str(error))
        return replace(result, code=error.code)
    return result


def print_line(text: str) -> None:
    """Print `text` and flush stdout, so that later output of child processes appears after it."""
    print(text, flush=True)


def print_error(text: str) -> None:
    """Print `text` on stderr, so that JSON on stdout stays valid."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def show_progress() -> Iterator[Progress]:
    """Yield a function that shows a message in a progress bar if there is a terminal.

    Messages from `with_progress` fill the bar. For other messages, the bar only shows activity.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(text: str) -> None:
            description, done, total = split_progress(text)
            bar.update(task, description=description, completed=done, total=total)

        yield show


def parse_option(option: str, parse: Callable[[str], T], text: str) -> T:
    """Return `parse(text)`. Turn a ValueError into an error that names `option`."""
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=f"'{option}'") from None
