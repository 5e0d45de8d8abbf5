"""`aisp export`: what folders of artifacts hold, for others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import finish


def add_to(app: typer.Typer) -> None:
    """Add the commands of this module to `app`."""
    app.command()(export)


def export(
    folder: Annotated[Path, typer.Argument(help="what --aisp-artifacts wrote")],
) -> None:
    """Print a run's timed sides as a file of pytest-benchmark."""
    from ..tools import export

    finish(export.answer(folder))
