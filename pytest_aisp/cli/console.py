"""What all commands share: printing results, showing progress, checking option values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn, TypeAlias, TypeVar

import typer

from ..util.cli_result import CliError, CliResult, split_progress

T = TypeVar("T")
Tell: TypeAlias = Callable[[str], None]

Json = Annotated[bool, typer.Option("--json", help="print JSON with all that is known")]
Store = Annotated[
    bool, typer.Option("--store", help="store the rates in BASELINES/<product>/peaks.json")
]
Yes = Annotated[bool, typer.Option("--yes", help="remove what is listed")]
Baselines = Annotated[Path, typer.Option(metavar="DIR", help="folder of stored results")]
DEFAULT_BASELINES = Path("baselines")


def finish(found: CliResult) -> NoReturn:
    """Print a result and end with its exit code."""
    say("\n".join(found.lines))
    raise typer.Exit(found.code)


def store_measured(found: CliResult, keep: Callable[[], Sequence[str]]) -> CliResult:
    """Store a measurement and report it on stderr; return its result, even if storing fails."""
    try:
        print_error("\n".join(keep()))
    except CliError as error:
        print_error(str(error))
        return replace(found, code=error.code)
    return found


def say(text: str) -> None:
    """Print `text` and flush, so that the output of child processes follows it."""
    print(text, flush=True)


def print_error(text: str) -> None:
    """Print `text` on stderr, so that JSON on stdout stays valid."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def show_progress() -> Iterator[Tell]:
    """Show a progress bar with the current step and its time; without a terminal, nothing.

    The bar fills if the text says how much is done (`with_progress`); otherwise it only moves.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    shown = (BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*shown, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def tell(told: str) -> None:
            text, done, of = split_progress(told)
            bar.update(task, description=text, completed=done, total=of)

        yield tell


def one_of(words: Collection[str], option: str, text: str) -> str:
    """Return `text` if it is one of `words`; otherwise fail with the legal values."""
    if text in words:
        return text
    said = f"{text!r} is no {option.removeprefix('--')}; legal are {', '.join(words)}"
    raise typer.BadParameter(said, param_hint=f"'{option}'")


def parse_option(option: str, parse: Callable[[str], T], text: str) -> T:
    """Return `parse(text)`; a ValueError becomes the error of this option."""
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=f"'{option}'") from None
