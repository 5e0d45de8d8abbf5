"""Predict the times of pages on a GPU that nobody here has, from its data sheet.

`aisp results predictions --product=nvidia-b200` prints them if no results of this product are
stored. They are never stored, and never shown as measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..page.gpu_specs import ARCHS
from ..results.models import ROLES, base_of
from ..results.row import digits, duration
from ..timing.data_sheets import REFERENCE, SHEETS, DataSheet, estimate, shares
from ..timing.peaks import Peaks
from ..timing.predict import Prediction, RateMissing
from ..util.cli_result import CliError, CliResult, columns
from .catalog import Catalog, CatalogCase
from .predictions import predicted_speedup, predicted_times
from .stored_results import chapters, stored_peaks, stored_products

HEADS: tuple[str, ...] = ("product", "chapter", "case", "side", "predicted from the data sheet")
HEADS += ("predicted speedup", "limit")


@dataclass(frozen=True)
class SideFromDataSheet:
    """The predicted time of one side, in seconds, and the predicted speedup of a variant.

    Attributes:
        predicted_from_data_sheet: None if a rate is missing.
        limit: the rate that takes the most time.
        missing: the rate that the data sheet lacks.
    """

    product: str
    chapter: str
    case: str
    side: str
    predicted_from_data_sheet: float | None
    predicted_speedup: float | None
    limit: str
    missing: str

    def row(self) -> tuple[str, ...]:
        seconds, gain = self.predicted_from_data_sheet, self.predicted_speedup
        time = f"not predicted: {self.missing}" if seconds is None else duration(seconds)
        speedup = "" if gain is None else f"{digits(gain)}x"
        return self.product, self.chapter, self.case, self.side, time, speedup, self.limit


def has_only_data_sheet(baselines: Path, product: str | None) -> bool:
    """Return whether there is a data sheet of `product`, but no stored result."""
    return product in SHEETS and product not in map(base_of, stored_products(baselines))


def data_sheet_result(catalog: Catalog, product: str, *, as_json: bool) -> CliResult:
    """Return the predicted times of all cases on `product`, which are timed on the H200.

    Raises:
        CliError: if no case of the H200 declares a cost, or if its rates are not stored.
    """
    sheet = SHEETS[product]
    names = [n for n in stored_products(catalog.baselines) if base_of(n) == REFERENCE]
    measured = {name: stored_peaks(catalog.baselines, name) for name in names}
    known = {name: peaks for name, peaks in measured.items() if peaks is not None}
    if not known:
        raise CliError(
            f"no peaks of {REFERENCE} are stored, from which the data sheet of {product} is scaled;"
            " measure them there:\n    aisp machine peak --store"
        )
    sides = [side for name in known for side in _sides(catalog, name, product, known[name])]
    if not sides:
        raise CliError(f"no case that is stored for {REFERENCE} runs on {sheet.arch} with a cost")
    if as_json:
        return CliResult([json.dumps([asdict(side) for side in sides], indent=1)])
    table = columns([HEADS, *(side.row() for side in sides)])
    return CliResult([*table, *_about(sheet, shares(list(known.values())[-1]), sides)])


def _sides(
    catalog: Catalog, reference: str, product: str, measured: Peaks
) -> Iterator[SideFromDataSheet]:
    """Yield both sides of each case on `reference` that has a cost, a baseline once per size."""
    peaks, name = estimate(product, measured), product + reference.removeprefix(REFERENCE)
    cases = {(case.chapter, case.key): case for case in catalog.cases}
    baselines = set()
    for chapter in chapters(catalog.baselines, reference):
        for key, result in sorted(chapter.stored.results.items()):
            case = cases.get((chapter.name, key))
            if case is None or result.value is None or not _runs(case, SHEETS[product].arch):
                continue
            times = predicted_times(case, result, peaks)
            once = case.path, case.function, str(case.size)
            for role in (role for role in ROLES if role in times):
                if role == "optimized" or once not in baselines:
                    yield _side((name, case.chapter, key), case, role, times)
            baselines.add(once)


def _runs(case: CatalogCase, arch: str) -> bool:
    """Return whether the case runs on `arch`. Older archs have none of the features in `needs`."""
    return arch in case.archs if arch in ARCHS else not case.needs


def _side(
    place: tuple[str, str, str],
    case: CatalogCase,
    role: str,
    times: Mapping[str, Prediction | RateMissing],
) -> SideFromDataSheet:
    time, is_variant = times[role], role == "optimized"
    gain = predicted_speedup(times) if is_variant else None
    side = case.variant if is_variant else "baseline"
    if isinstance(time, RateMissing):
        return SideFromDataSheet(*place, side, None, gain, "", time.rate)
    return SideFromDataSheet(*place, side, time.seconds, gain, time.limit, "")


def _about(
    sheet: DataSheet, reached: Mapping[str, float], sides: Sequence[SideFromDataSheet]
) -> Iterator[str]:
    """Yield the source, the assumptions, and the rates that the data sheet lacks."""
    yield f"not measured: {sheet.source}"
    listed = ", ".join(f"{name} {share:.0%}" for name, share in reached.items())
    yield f"assumed: rates reach the share of the data sheet that {REFERENCE} reaches ({listed})"
    l2 = f"{sheet.figures['l2']:.0f} MB" if "l2" in sheet.figures else "unknown"
    ours = f"{SHEETS[REFERENCE].figures['l2']:.0f} MB"
    yield f"assumed: fixed times, such as of a launch, are those of {REFERENCE}"
    yield f"assumed: costs do not change with the L2 ({REFERENCE}: {ours}, here: {l2})"
    if missing := sorted({side.missing for side in sides if side.missing}):
        count = sum(bool(side.missing) for side in sides)
        yield f"{count} not predicted: the data sheet lacks {', '.join(missing)}"
