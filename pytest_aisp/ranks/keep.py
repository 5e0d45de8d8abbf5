"""Keep what several GPUs reach among the peaks of their product, ``nvidia-h200-x2``."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from pathlib import Path

from ..bench import peaks
from ..common.answers import Unanswerable, rate_text
from ..common.device import Machine
from ..results.row import duration


def refuse_under_ci() -> None:
    """Refuse to store where CI is set, before anything is measured."""
    if os.environ.get("CI"):
        raise Unanswerable(
            "--store is refused where CI is set: a gate must not move its own limits\n"
            "Store on the machine by hand and commit the file"
        )


def keep(
    baselines: Path,
    machine: Machine,
    count: int,
    rates: Mapping[str, float],
    facts: Mapping[str, str],
) -> list[str]:
    """Add `rates` of `count` GPUs of `machine` to their peaks; return what was written, in words.

    Args:
        facts: by rate, how it was taken; versions and the date are put behind.

    Raises:
        Unanswerable: where the GPUs are not of one product, or the file cannot be written.
    """
    if count > len(machine.gpus):
        raise Unanswerable(
            f"nothing is stored: of {count} GPUs {len(machine.gpus)} are {machine.name}, and peaks"
            " belong to one product"
        )
    product = machine.with_count(count)
    path = peaks.path_of(baselines, product)
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    versions = ", ".join(f"{k} {v}" for k, v in machine.versions.items())
    told = {key: f"{how}, {versions}, {date}" for key, how in facts.items()}
    try:
        peaks.add(path, product, rates, {"name": f"{count} x {machine.name}", **told})
    except (peaks.PeaksError, OSError) as error:
        raise Unanswerable(f"nothing is stored: {error}") from None
    return [f"stored in {path}: {key} {_amount(key, rates[key])}" for key in rates]


def _amount(key: str, rate: float) -> str:
    return duration(rate) if key in peaks.SECONDS else rate_text(rate)
