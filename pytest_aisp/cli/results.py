"""`aisp roofline | expectations | prune | compare | seals`: what stored results and runs say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import HERE, Baselines, Json, Yes, finish, one_of, telling
from .several import Several, Targets

Product = Annotated[
    str | None,
    typer.Option(metavar="PRODUCT", help="default: this machine's, else the only one stored"),
]


def add_to(app: typer.Typer) -> None:
    """Add the commands of this module to `app`."""
    app.command(cls=Several)(roofline)
    app.command()(expectations)
    app.command()(prune)
    app.command()(compare)
    app.command()(seals)


def roofline(targets: Targets = None, product: Product = None, as_json: Json = False) -> None:
    """Hold stored results against the measured peaks."""
    from ..common.device import Machine
    from ..tools import catalogue, products, roofline

    with telling() as tell:
        found = catalogue.collect(targets, tell=tell)
    names = products.chosen(found.baselines, product, Machine.here())
    finish(roofline.answer(found, names, targets or (), as_json=as_json))


def expectations(
    product: Product = None,
    form: Annotated[
        str, typer.Option("--format", metavar="text|csv|json", help="how it is printed")
    ] = "text",
    arch: Annotated[
        str | None, typer.Option(metavar="ARCH", help="whose claims count, as sm90")
    ] = None,
) -> None:
    """Hold stored results against what pages claim."""
    from ..common.device import Machine
    from ..tools import catalogue, expectations, products

    wanted, machine = one_of(expectations.FORMATS, "--format", form), Machine.here()
    with telling() as tell:
        found = catalogue.collect(tell=tell)
    names = products.chosen(found.baselines, product, machine)
    archs = {name: products.arch_of(name, arch, machine) for name in names}
    finish(expectations.answer(found, archs, form=wanted))


def prune(
    product: Annotated[
        str | None, typer.Option(metavar="PRODUCT", help="default: every one")
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """List stored results whose case is gone."""
    from ..tools import catalogue, prune

    with telling() as tell:
        found = catalogue.collect(tell=tell)
    finish(prune.answer(found, product, yes=yes, as_json=as_json))


def compare(
    old: Annotated[str, typer.Argument(help="a run's folder, one of stored results, or a commit")],
    new: Annotated[str, typer.Argument(help="likewise")],
    form: Annotated[
        str, typer.Option("--format", metavar="text|markdown|json", help="how it is printed")
    ] = "text",
    every: Annotated[
        bool, typer.Option("--all", help="also what is within its noise; json always has it")
    ] = False,
) -> None:
    """Compare two runs, or the stored results of two commits: what changed, the worst first."""
    from ..tools import compare

    wanted = one_of(compare.FORMS, "--format", form)
    finish(compare.answer(old, new, form=wanted, every=every, root=Path.cwd()))


def seals(
    files: Annotated[
        list[Path] | None, typer.Argument(help="default: those that differ from REF")
    ] = None,
    against: Annotated[
        str, typer.Option(metavar="REF", help="the commit before, as origin/main")
    ] = "HEAD",
    baselines: Baselines = HERE,
) -> None:
    """Refuse staged results that no run has recorded."""
    from ..tools import seals

    finish(seals.answer(files or (), baselines, against))
