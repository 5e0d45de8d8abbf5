"""`aisp export | gate`: what folders of artifacts hold, for others; several as one verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import finish, one_of


def add_to(app: typer.Typer) -> None:
    """Add the commands of this module to `app`."""
    app.command()(export)
    app.command()(gate)


def export(
    folder: Annotated[Path, typer.Argument(help="what --aisp-artifacts wrote")],
) -> None:
    """Print a run's timed sides as a file of pytest-benchmark."""
    from ..tools import export

    finish(export.answer(folder))


def gate(
    folders: Annotated[list[Path], typer.Argument(help="what --aisp-artifacts wrote, each")],
    products: Annotated[
        str, typer.Option(metavar="P,P", help="those that are to be there, as nvidia-h200")
    ] = "",
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="text|markdown|github|gitlab|json",
            help="github: annotations; gitlab: a Code Quality report",
        ),
    ] = "text",
) -> None:
    """Give the runs of several machines one verdict."""
    from ..tools import gate, gate_forms

    wanted = one_of(gate_forms.FORMS, "--format", form)
    expected = [product for product in products.split(",") if product]
    finish(gate.answer(folders, expected, form=wanted, root=Path()))
