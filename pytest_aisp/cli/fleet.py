"""`aisp fleet ...`: machines that run one suite together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import DEFAULT_BASELINES, Baselines, finish

Head = Annotated[bool, typer.Option("--head", help="this machine is the first one")]
Address = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="the address of the first machine")
]
Show = Annotated[bool, typer.Option("--show", help="print the command of Ray; run nothing")]
Block = Annotated[
    bool, typer.Option("--block", help="wait until Ray ends, as a step of Slurm must")
]
Gpus = Annotated[int, typer.Option(metavar="N", min=0, help="the number of simulated GPUs")]
Only = Annotated[str | None, typer.Option(metavar="PRODUCT", help="default: all products")]


def start(
    head: Head = False,
    address: Address = None,
    block: Block = False,
    simulated_gpus: Gpus = 0,
    show: Show = False,
) -> None:
    """Start Ray on this machine, as a fleet needs it."""
    from ..fleet.probe import probe
    from ..fleet.start import start_command, start_result

    command = start_command(probe(), head=head, address=address, gpus=simulated_gpus, block=block)
    finish(start_result(command, show=show))


def resume(address: Address = None) -> None:
    """Go on with the fleet run that was interrupted here."""
    from ..fleet.start import resume

    raise typer.Exit(resume(Path.cwd(), address))


def boards(product: Only = None, baselines: Baselines = DEFAULT_BASELINES) -> None:
    """Show how the boards of one product disagree in stored results."""
    from ..fleet.boards import boards_result

    finish(boards_result(baselines, product))
