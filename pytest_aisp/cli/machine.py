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
    from ..distributed import bandwidth
    from ..tools import roofline
    from ..util.device import Machine

    if store:
        bandwidth.refuse_under_ci()
    with telling() as tell:
        measured = roofline.measure_peaks(Machine.here(), tell)
    found = roofline.peak_result(measured, as_json=as_json)
    if store:
        found = kept(found, lambda: roofline.keep(measured, baselines))
    finish(found)


def doctor(as_json: Json = False) -> None:
    """Say what spoils measurements here."""
    from ..tools import doctor

    finish(doctor.doctor_result(doctor.look(), as_json=as_json))


def clean(yes: Yes = False, as_json: Json = False) -> None:
    """List what runs left under the root."""
    from ..tools import catalog, cleanup

    with telling() as tell:
        found = catalog.collect((), tell=tell)
    finish(cleanup.clean_result(found, yes=yes, as_json=as_json))
