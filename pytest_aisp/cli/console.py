"""What every command shares: its answer printed, what it is doing shown, its words read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn, TypeAlias, TypeVar

import typer

from ..util.cli_result import CliError, CliResult, parted

T = TypeVar("T")
Tell: TypeAlias = Callable[[str], None]

Json = Annotated[bool, typer.Option("--json", help="one JSON object, with all that is known")]
Store = Annotated[
    bool, typer.Option("--store", help="keep the rates in BASELINES/<product>/peaks.json")
]
Yes = Annotated[bool, typer.Option("--yes", help="do it; without, it is only listed")]
Baselines = Annotated[Path, typer.Option(metavar="DIR", help="folder of stored results")]
HERE = Path("baselines")


def finish(found: CliResult) -> NoReturn:
    """Print an answer and end with its exit code."""
    say("\n".join(found.lines))
    raise typer.Exit(found.code)


def kept(found: CliResult, keep: Callable[[], Sequence[str]]) -> CliResult:
    """Store what was measured, and say what `keep` did; it is shown all the same where not."""
    try:
        complain("\n".join(keep()))
    except CliError as error:
        complain(str(error))
        return replace(found, code=error.code)
    return found


def say(text: str) -> None:
    """Print `text` at once, so that what a process of ours prints comes behind it."""
    print(text, flush=True)


def complain(text: str) -> None:
    """Print `text` on stderr: an answer in JSON stays whole."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def telling() -> Iterator[Tell]:
    """Show on a terminal what is being done, and for how long; elsewhere nothing.

    The bar fills where the work says how much is done (`part_of`), and else only moves.
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
            text, done, of = parted(told)
            bar.update(task, description=text, completed=done, total=of)

        yield tell


def one_of(words: Collection[str], option: str, text: str) -> str:
    """Return an option's text, which is to be one of `words`."""
    if text in words:
        return text
    said = f"{text!r} is no {option.removeprefix('--')}; legal are {', '.join(words)}"
    raise typer.BadParameter(said, param_hint=f"'{option}'")


def parsed(option: str, parse: Callable[[str], T], text: str) -> T:
    """Return what `parse` makes of an option's text; its ValueError is the command's error."""
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=f"'{option}'") from None
