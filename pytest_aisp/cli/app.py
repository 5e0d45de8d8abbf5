"""The command line `aisp`: every command of it, and how it ends.

Exit codes: 0, all is well; 1, something here is wrong (no GPU, a slow hop, a result below its
claim); 2, the question cannot be answered here, or was asked wrongly. Where pytest or a script is
run, theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import typer

from ..util.cli_result import CliError
from . import links, machine, results, suite
from .console import complain


def build() -> typer.Typer:
    """Return the app with all of its commands."""
    app = typer.Typer(
        name="aisp",
        help="Pages, stored results and the machine, for those who compare sides on GPUs.",
        rich_markup_mode=None,  # errors go into logs: a message is not wrapped into a frame
        pretty_exceptions_enable=False,
    )
    suite.add_to(app)
    results.add_stored_commands(app)
    results.add_folder_commands(app)
    machine.add_to(app)
    links.add_to(app)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, print its answer, return its exit code."""
    command = typer.main.get_command(build())
    try:
        command.main(None if arguments is None else list(arguments), prog_name="aisp")
    except CliError as error:
        complain(str(error))
        return error.code
    except SystemExit as ended:  # what Typer ends with, errors and help included
        if isinstance(ended.code, str):
            raise
        return ended.code or 0
    return 0
