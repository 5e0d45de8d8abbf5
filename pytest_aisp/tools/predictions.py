"""Compare the times that pages' costs predict with the stored times.

`aisp results predictions` lists each timed side whose page declares a cost, the worst prediction
first. A prediction needs the rates in the product's `peaks.json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from ..page.cost import Cost
from ..results.models import Result
from ..results.row import duration
from ..timing.peaks import Peaks
from ..timing.predict import EXPLAINED, Prediction, RateMissing, predict
from ..util.cli_result import CliError, CliResult, columns
from .catalog import Catalog, CatalogCase
from .stored_results import chapters, stored_peaks

HEADS = ("product", "chapter", "case", "side", "predicted", "stored", "stored / predicted", "limit")


@dataclass(frozen=True)
class PredictedSide:
    """The predicted and the stored time of one side, in seconds.

    Attributes:
        limit: the rate that takes the most time.
    """

    product: str
    chapter: str
    case: str
    side: str
    predicted: float
    stored: float
    limit: str

    @property
    def ratio(self) -> float:
        """The stored time divided by the predicted time."""
        return self.stored / self.predicted

    def row(self) -> tuple[str, ...]:
        times = duration(self.predicted), duration(self.stored), f"{self.ratio:.2f}"
        return self.product, self.chapter, self.case, self.side, *times, self.limit


def predictions_result(catalog: Catalog, products: Sequence[str], *, as_json: bool) -> CliResult:
    """Return the predicted and the stored times of all sides that declare a cost.

    Raises:
        CliError: if no side declares a cost, or if a rate was not measured.
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
    sides.sort(key=lambda side: -abs(math.log(side.ratio)))
    if as_json:
        return CliResult([json.dumps([asdict(side) for side in sides], indent=1)])
    close = sum(abs(side.ratio - 1) <= EXPLAINED for side in sides)
    lines = [*unread, *columns([HEADS, *(side.row() for side in sides)])]
    return CliResult([*lines, f"{close} of {len(sides)} within {EXPLAINED:.0%} of the prediction"])


def predictions(catalog: Catalog, product: str) -> Iterator[PredictedSide]:
    """Yield each side of the stored results of `product` that declares a cost, once per size."""
    cases = {(case.chapter, case.key): case for case in catalog.cases}
    peaks = stored_peaks(catalog.baselines, product)
    baselines = set()
    for chapter in chapters(catalog.baselines, product):
        for key, result in sorted(chapter.stored.results.items()):
            case = cases.get((chapter.name, key))
            if case is None or result.value is None:
                continue
            for role, phases in case.costs.items():
                once = case.path, case.function, str(case.size)
                if role == "baseline" and once in baselines:
                    continue
                baselines.add(once)
                yield _predicted(product, case, role, phases, result, peaks)


TABLE_HEADS = (
    *("size", "side", "predicted", "stored", "predicted speedup", "stored speedup"),
    "share of limit",
)


def page_tables(catalog: Catalog, products: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a table for each product: the times and speedups of all sides."""
    cases = {(case.chapter, case.key): case for case in catalog.cases}
    for product in products:
        peaks = stored_peaks(catalog.baselines, product)
        rows: dict[tuple[str, str], tuple[str, ...]] = {}
        for chapter in chapters(catalog.baselines, product):
            for key, result in chapter.stored.results.items():
                case = cases.get((chapter.name, key))
                if case is not None and result.value is not None:
                    for row in _rows(product, case, result, peaks):
                        rows.setdefault((row[0], row[1]), row)  # the baseline's first case counts
        if rows:
            yield from ["", f"{product}:", "", *columns([TABLE_HEADS, *rows.values()])]


def _rows(
    product: str, case: CatalogCase, result: Result, peaks: Peaks | None
) -> Iterator[tuple[str, ...]]:
    size = ", ".join(f"{name}={value}" for name, value in case.size.items())
    times = {
        role: _prediction(product, case, role, phases, result, peaks).seconds
        for role, phases in case.costs.items()
    }
    texts = {role: duration(seconds) for role, seconds in times.items()}
    stored = duration(cast(float, result.baseline_us) * 1e-6)
    yield size, "baseline", texts.get("baseline", "-"), stored, "", "", ""
    both = "baseline" in times and "optimized" in times
    gain = f"{times['baseline'] / times['optimized']:.3g}x" if both else "-"
    stored = duration(cast(float, result.optimized_us) * 1e-6)
    speedup = f"{result.speedup:.3g}x"
    share = "-" if result.share is None else f"{result.share:.0%} of {result.limit}"
    yield size, case.variant, texts.get("optimized", "-"), stored, gain, speedup, share


def _predicted(
    product: str,
    case: CatalogCase,
    role: str,
    phases: Sequence[Mapping[str, Any]],
    result: Result,
    peaks: Peaks | None,
) -> PredictedSide:
    predicted = _prediction(product, case, role, phases, result, peaks)
    stored = result.baseline_us if role == "baseline" else result.optimized_us
    side = case.variant if role == "optimized" else "baseline"
    seconds = cast(float, stored) * 1e-6
    return PredictedSide(
        *(product, case.chapter, case.key, side, predicted.seconds, seconds, predicted.limit)
    )


def _prediction(
    product: str,
    case: CatalogCase,
    role: str,
    phases: Sequence[Mapping[str, Any]],
    result: Result,
    peaks: Peaks | None,
) -> Prediction:
    if peaks is None:
        raise CliError(
            f"no peaks of {product} are stored; measure them there:\n    aisp machine peak --store"
        )
    first, *rest = (Cost(**phase) for phase in phases)
    try:
        return predict(sum(rest, first), peaks, graph=result.clock == "graph")
    except RateMissing as error:
        raise CliError(f"{case.path}: the cost of the {role} of {case.key}: {error}") from None
