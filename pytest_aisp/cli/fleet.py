"""`aisp fleet ...`: run one suite on several machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import DEFAULT_BASELINES, Baselines, finish

Head = Annotated[
    bool, typer.Option("--head", help="make this machine the first one of the cluster")
]
Address = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="the address of the first machine")
]
Show = Annotated[bool, typer.Option("--show", help="print the Ray command, but do not run it")]
Block = Annotated[bool, typer.Option("--block", help="wait until Ray ends; needed in a Slurm step")]
Gpus = Annotated[int, typer.Option(metavar="N", min=0, help="the number of simulated GPUs")]
Only = Annotated[str | None, typer.Option(metavar="PRODUCT", help="default: all products")]


def start(
    head: Head = False,
    address: Address = None,
    block: Block = False,
    simulated_gpus: Gpus = 0,
    show: Show = False,
) -> None:
    """Start Ray on this machine with the options that a fleet needs."""
    from ..fleet.probe import probe
    from ..fleet.start import start_command, start_result

    command = start_command(probe(), head=head, address=address, gpus=simulated_gpus, block=block)
    finish(start_result(command, show=show))


def resume(address: Address = None) -> None:
    """Continue the fleet run that was interrupted in this folder."""
    from ..fleet.start import resume

    raise typer.Exit(resume(Path.cwd(), address))


def boards(product: Only = None, baselines: Baselines = DEFAULT_BASELINES) -> None:
    """Compare the stored results of different boards (GPUs) of the same product."""
    from ..fleet.boards import boards_result

    finish(boards_result(baselines, product))
