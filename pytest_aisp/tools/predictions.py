"""Predict times from the costs that pages declare, and compare the predictions with stored times.

`aisp results predictions` lists each timed side that has a cost, the worst prediction first. A
prediction uses the rates in the product's `peaks.json`. For a GPU without stored results, such as
``--product=nvidia-b200``, the rates are estimated from the data sheet. Predictions from a data
sheet are never stored, and never shown as measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..page.cost import Cost
from ..page.gpu_specs import ARCHS
from ..results.models import ROLES, Result, base_of
from ..results.row import digits, duration
from ..timing.data_sheets import REFERENCE, SHEETS, DataSheet, estimate, shares
from ..timing.peaks import Peaks
from ..timing.predict import EXPLAINED, Prediction, RateMissing, explains, how_to_measure, predict
from ..util.cli_result import CliError, CliResult, columns
from .catalog import Catalog, CatalogCase
from .stored_results import STALE, WHY_STALE, assumed_peer, chapters, known_peaks, stored_products

HEADS = ("product", "chapter", "case", "side", "predicted", "stored", "stored / predicted", "limit")


@dataclass(frozen=True)
class PredictedSide:
    """The predicted and the stored time of one side, in seconds.

    Attributes:
        predicted: the predicted time, or None if a rate is missing.
        limit: the name of the rate with the largest part of the predicted time.
        missing: the first rate that the prediction lacks, because it was not measured.
        unexplained: whether the times differ, and the page's section `Seen` does not name the side.
    """

    product: str
    chapter: str
    case: str
    side: str
    predicted: float | None
    stored: float
    limit: str = ""
    missing: str = ""
    unexplained: bool = False

    @property
    def ratio(self) -> float | None:
        """The stored time divided by the predicted time."""
        return self.stored / self.predicted if self.predicted else None

    def row(self) -> tuple[str, ...]:
        predicted = f"not predicted: {self.missing}"
        if self.predicted is not None:
            predicted = duration(self.predicted)
        ratio = (
            "-" if self.ratio is None else f"{self.ratio:.2f}" + " unexplained" * self.unexplained
        )
        times = predicted, duration(self.stored), ratio
        return self.product, self.chapter, self.case, self.side, *times, self.limit


def predictions_result(catalog: Catalog, products: Sequence[str], *, as_json: bool) -> CliResult:
    """Return the predicted and the stored times of all sides that declare a cost.

    Raises:
        CliError: if no side declares a cost, or if a product has no stored peaks.
    """
    sides = [side for product in products for side in predictions(catalog, product)]
    unread = [f"{page.path} was not read: {page.text}" for page in catalog.unread]
    if not sides:
        raise CliError(
            "\n".join(
                [
                    *unread,
                    f"no page with stored results of {', '.join(products)} declares a cost; write",
                    "    @compare(..., costs={side: lambda n: Cost(read=4 * n, launches=1)})",
                ]
            )
        )
    sides.sort(key=lambda side: -abs(math.log(side.ratio)) if side.ratio else math.inf)
    if as_json:
        return CliResult([json.dumps([asdict(side) for side in sides], indent=1)])
    times = [(side.predicted, side.stored) for side in sides if side.predicted is not None]
    close = sum(explains(predicted, stored) for predicted, stored in times)
    lines = [*unread, *columns([HEADS, *(side.row() for side in sides)])]
    lines.append(f"{close} of {len(times)} within {EXPLAINED:.0%} of the prediction")
    lines += assumed_peer(catalog.baselines, products)
    return CliResult([*lines, *missing_line([side.missing for side in sides])])


def missing_line(rates: Sequence[str]) -> list[str]:
    """Return a line about the sides without a prediction, or no line if there are none.

    Args:
        rates: the name of the missing rate, or an empty string, for each side.
    """
    names = sorted({rate for rate in rates if rate})
    if not names:
        return []
    count = sum(map(bool, rates))
    sides = "1 side is" if count == 1 else f"{count} sides are"
    listed = f"rate {names[0]} was" if len(names) == 1 else f"rates {', '.join(names)} were"
    text = f"{sides} not predicted, because the {listed} not measured there"
    if commands := sorted({how_to_measure(name) for name in names} - {""}):
        text += f": run {' and '.join(commands)}"
    if unmeasured := [name for name in names if not how_to_measure(name)]:
        text += f" (no command measures {', '.join(unmeasured)})"
    return [text]


def predictions(catalog: Catalog, product: str) -> Iterator[PredictedSide]:
    """Yield each stored side that declares a cost. Each baseline is yielded once per size."""
    cases = {(case.chapter, case.key): case for case in catalog.cases}
    peaks = known_peaks(catalog.baselines, product)
    baselines = set()
    for chapter in chapters(catalog.baselines, product):
        for key, result in sorted(chapter.stored.results.items()):
            case = cases.get((chapter.name, key))
            if case is None or result.value is None:
                continue
            for role in case.costs:
                once = case.path, case.function, str(case.size)
                if role == "baseline" and once in baselines:
                    continue
                baselines.add(once)
                if peaks is None:
                    raise CliError(
                        f"no peaks of {product} are stored; measure them there:\n"
                        "    aisp machine peak --store"
                    )
                yield _predicted(product, case, role, result, peaks)


def _predicted(
    product: str, case: CatalogCase, role: str, result: Result, peaks: Peaks
) -> PredictedSide:
    side = case.variant if role == "optimized" else "baseline"
    place, stored = (product, case.chapter, case.key, side), result.seconds[role]
    predicted = predicted_times(case, result, peaks)[role]
    if isinstance(predicted, RateMissing):
        return PredictedSide(*place, None, stored, missing=predicted.rate)
    unexplained = case.is_unexplained(role, predicted.seconds, result)
    return PredictedSide(*place, predicted.seconds, stored, predicted.limit, "", unexplained)


def predicted_times(
    case: CatalogCase, result: Result, peaks: Peaks
) -> dict[str, Prediction | RateMissing]:
    """Return the predicted time or the missing rate of each role with a cost."""
    graph = result.clock == "graph"
    return {role: _prediction(phases, peaks, graph) for role, phases in case.costs.items()}


def _prediction(
    phases: Sequence[Mapping[str, Any]], peaks: Peaks, graph: bool
) -> Prediction | RateMissing:
    first, *rest = (Cost(**phase) for phase in phases)
    try:
        return predict(sum(rest, first), peaks, graph=graph)
    except RateMissing as error:
        return error


def predicted_speedup(times: Mapping[str, Prediction | RateMissing]) -> float | None:
    """Return the predicted speedup, or None if a side has no prediction."""
    baseline, optimized = times.get("baseline"), times.get("optimized")
    if not isinstance(baseline, Prediction) or not isinstance(optimized, Prediction):
        return None
    return baseline.seconds / optimized.seconds if optimized.seconds else None


TABLE_HEADS = (
    *("size", "side", "predicted", "stored", "predicted speedup", "stored speedup"),
    "share of limit",
)


def page_tables(catalog: Catalog, products: Sequence[str]) -> Iterator[str]:
    """Yield the lines of one table per product, with the times and speedups of all sides."""
    cases = {(case.chapter, case.key): case for case in catalog.cases}
    for product in products:
        peaks = known_peaks(catalog.baselines, product) or Peaks(product, {})
        rows: dict[tuple[str, str], tuple[str, ...]] = {}
        missing: dict[tuple[str, str], str] = {}
        for chapter in chapters(catalog.baselines, product):
            for key, result in chapter.stored.results.items():
                case = cases.get((chapter.name, key))
                if case is not None and result.value is not None:
                    times = predicted_times(case, result, peaks)
                    for row, role in zip(_rows(case, result, times), ROLES, strict=True):
                        side = row[0], row[1]
                        rows.setdefault(side, row)  # a baseline keeps its first case's row
                        time = times.get(role)
                        rate = time.rate if isinstance(time, RateMissing) else ""
                        missing.setdefault(side, rate)
        if rows:
            yield from ["", f"{product}:", "", *columns([TABLE_HEADS, *rows.values()])]
            yield from assumed_peer(catalog.baselines, [product])
            yield from missing_line(list(missing.values()))
            if any(row[3].endswith(STALE) for row in rows.values()):
                yield WHY_STALE


def _rows(
    case: CatalogCase, result: Result, times: Mapping[str, Prediction | RateMissing]
) -> Iterator[tuple[str, ...]]:
    size = ", ".join(f"{name}={value}" for name, value in case.size.items())
    baseline, optimized = (_time_text(times.get(role)) for role in ROLES)
    changed = case.stale_roles(result)
    stored = {r: duration(result.seconds[r]) + STALE * (r in changed) for r in ROLES}
    yield size, "baseline", baseline, stored["baseline"], "", "", ""
    gain = predicted_speedup(times)
    share = "-" if result.share is None else f"{result.share:.0%} of {result.limit}"
    speedups = "-" if gain is None else f"{gain:.3g}x", f"{result.speedup:.3g}x"
    yield size, case.variant, optimized, stored["optimized"], *speedups, share


def _time_text(predicted: Prediction | RateMissing | None) -> str:
    if predicted is None:
        return "-"
    if isinstance(predicted, RateMissing):
        return f"not predicted: {predicted.rate}"
    return duration(predicted.seconds)


DATA_SHEET_HEADS = (
    *("product", "chapter", "case", "side", "predicted from the data sheet", "predicted speedup"),
    "limit",
)


@dataclass(frozen=True)
class SideFromDataSheet:
    """The predicted time of one side, in seconds, and the predicted speedup if it is a variant.

    Attributes:
        predicted_from_data_sheet: the predicted time, or None if a rate is missing.
        limit: the name of the rate with the largest part of the predicted time.
        missing: the name of the rate that the data sheet lacks.
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
    """Return whether `product` has a data sheet, but no stored result."""
    return product in SHEETS and product not in map(base_of, stored_products(baselines))


def data_sheet_result(catalog: Catalog, product: str, *, as_json: bool) -> CliResult:
    """Return the predicted times on `product` for all cases that were timed on the H200.

    Raises:
        CliError: if no case of the H200 declares a cost, or if the H200's rates are not stored.
    """
    sheet = SHEETS[product]
    names = [n for n in stored_products(catalog.baselines) if base_of(n) == REFERENCE]
    measured = {name: known_peaks(catalog.baselines, name) for name in names}
    known = {name: peaks for name, peaks in measured.items() if peaks is not None}
    if not known:
        raise CliError(
            f"no peaks of {REFERENCE} are stored, from which the data sheet of {product} is scaled;"
            " measure them there:\n    aisp machine peak --store"
        )
    sides = [
        side for name in known for side in _data_sheet_sides(catalog, name, product, known[name])
    ]
    if not sides:
        raise CliError(f"no stored case of {REFERENCE} that declares a cost runs on {sheet.arch}")
    if as_json:
        return CliResult([json.dumps([asdict(side) for side in sides], indent=1)])
    table = columns([DATA_SHEET_HEADS, *(side.row() for side in sides)])
    return CliResult([*table, *_assumptions(sheet, shares(list(known.values())[-1]), sides)])


def _data_sheet_sides(
    catalog: Catalog, reference: str, product: str, measured: Peaks
) -> Iterator[SideFromDataSheet]:
    """Yield all sides with a cost stored for `reference`. A baseline appears once per size."""
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
                    yield _data_sheet_side((name, case.chapter, key), case, role, times)
            baselines.add(once)


def _runs(case: CatalogCase, arch: str) -> bool:
    """Return whether the case runs on `arch`. An arch outside `ARCHS` has no feature in `needs`."""
    return arch in case.archs if arch in ARCHS else not case.needs


def _data_sheet_side(
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


def _assumptions(
    sheet: DataSheet, reached: Mapping[str, float], sides: Sequence[SideFromDataSheet]
) -> Iterator[str]:
    """Yield the data sheet's source, the assumptions, and the rates missing from the sheet."""
    yield f"not measured: {sheet.source}"
    listed = ", ".join(f"{name} {share:.0%}" for name, share in reached.items())
    yield f"assumed: rates reach the share of the data sheet that {REFERENCE} reaches ({listed})"
    sizes = (s.figures.get("l2") for s in (SHEETS[REFERENCE], sheet))
    ours, l2 = (f"{size:.0f} MB" if size else "unknown" for size in sizes)
    yield f"assumed: fixed times, such as of a launch, are those of {REFERENCE}"
    yield f"assumed: shared memory and special functions have {REFERENCE}'s rate per SM and cycle"
    yield f"assumed: costs do not change with the L2 ({REFERENCE}: {ours}, here: {l2})"
    if missing := sorted({side.missing for side in sides if side.missing}):
        count = sum(bool(side.missing) for side in sides)
        yield f"{count} not predicted: the data sheet lacks {', '.join(missing)}"
