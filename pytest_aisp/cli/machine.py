"""`aisp peak | doctor | clean`: the machine, and what runs left on it."""

from __future__ import annotations

import typer

from .console import HERE, Baselines, Json, Store, Yes, finish, kept, telling


def add_to(app: typer.Typer) -> None:
    """Add the commands of this module to `app`."""
    app.command()(peak)
    app.command()(doctor)
    app.command()(clean)


def peak(as_json: Json = False, store: Store = False, baselines: Baselines = HERE) -> None:
    """Measure the best rates of this machine."""
    from ..common.device import Machine
    from ..ranks import keep
    from ..tools import peak

    if store:
        keep.refuse_under_ci()
    with telling() as tell:
        measured = peak.measure(Machine.here(), tell)
    found = peak.answer(measured, as_json=as_json)
    if store:
        found = kept(found, lambda: peak.keep(measured, baselines))
    finish(found)


def doctor(as_json: Json = False) -> None:
    """Say what spoils measurements here."""
    from ..tools import doctor

    finish(doctor.answer(doctor.look(), as_json=as_json))


def clean(yes: Yes = False, as_json: Json = False) -> None:
    """List what runs left under the root."""
    from ..tools import catalogue, clean

    with telling() as tell:
        found = catalogue.collect((), tell=tell)
    finish(clean.answer(found, yes=yes, as_json=as_json))
