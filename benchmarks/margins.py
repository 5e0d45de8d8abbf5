"""The margin against a stored result, by its number of sessions: simulated, and cross-validated.

    python benchmarks/margins.py            quick: 2,000 cases per row
    python benchmarks/margins.py --full     20,000, the tables of docs/explanation/spread.md
    python benchmarks/margins.py --stored   only the tables about stored results; no simulation

Chapters of 40 cases are recorded in 1, 2, 3 or 5 sessions, and judged in one more session. The code
that judges real runs computes margin and `detects`. The session of a run shifts ln(speedup), and
its processes scatter. For a given scatter, a case is red if the shift exceeds a threshold. So the
probability of a red verdict is computed from the distribution of shifts, not counted.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from pytest_aisp.results import models, stats, store, verdict

CHAPTER, PROCESSES, SPREAD = 40, 3, 0.001
SESSION = verdict.UNKNOWN_SESSION["graph"]
COUNTS = (1, 2, 3, 5)
SIZES = (0.1, 0.5)
"""Limits between small, medium and large sizes of ln(speedup)."""
BASELINES = Path(__file__).parents[1] / "baselines"


class Shifts(NamedTuple):
    """One case's shifts: `draw` draws one, and `above` is the probability of exceeding a value."""

    draw: Callable[[random.Random], float]
    above: Callable[[float], float]


def normal(sd: float) -> Shifts:
    """Return normal shifts."""
    return Shifts(lambda rng: rng.gauss(0, sd), lambda x: math.erfc(x / sd / math.sqrt(2)) / 2)


def heavy(sd: float) -> Shifts:
    """Return shifts with the distribution of Student's t(4), scaled to the standard deviation."""
    scale = sd / math.sqrt(2)

    def draw(rng: random.Random) -> float:
        return scale * rng.gauss(0, 1) / math.sqrt(rng.gammavariate(2, 2) / 4)

    def above(x: float) -> float:
        u = 1 + (x / scale) ** 2 / 4
        return 0.5 - 0.375 * (x / scale) / math.sqrt(u) * (1 - (1 - 1 / u) / 3)

    return Shifts(draw, above)


def alike(rng: random.Random) -> Shifts:
    return heavy(SESSION)


def unlike(rng: random.Random) -> Shifts:
    return normal(SESSION * math.sqrt(2 / rng.gammavariate(2, 2)))  # 1 / chi^2(4) has the mean 1/2


def both(rng: random.Random) -> Shifts:
    return heavy(SESSION * math.exp(rng.gauss(0, 0.5) - 0.25))


def resampled(shifts: Sequence[float]) -> Callable[[random.Random], Shifts]:
    """Return a model that draws stored shifts, each with a random sign."""
    ordered = sorted([*shifts, *(-shift for shift in shifts)])

    def above(x: float) -> float:
        return 1 - bisect_right(ordered, x) / len(ordered)

    return lambda rng: Shifts(lambda r: r.choice(ordered), above)


def resampled_cases(shifts: Sequence[float]) -> Callable[[random.Random], Shifts]:
    """Return a model in which each case has normal shifts as large as one stored shift."""
    return lambda rng: normal(max(1e-5, abs(rng.choice(shifts))))


class Outcome(NamedTuple):
    """A case: the loss it detects, and its probabilities of a false alarm and of a miss."""

    detects: float
    red: float
    missed: float


def judge(shifts: Shifts, value: float, session: float, rng: random.Random) -> Outcome:
    """Return the outcome of a case with this stored value and spread between sessions."""
    margin = verdict.record_margin(SPREAD, session, "graph")
    gate, _ = verdict.record_gates(value, margin)
    loss = verdict.detectable([gate], SPREAD, session)
    first, *votes = (rng.gauss(0, SPREAD) for _ in range(1 + verdict.ATTEMPTS))
    limit = value - max(gate.screen + first, gate.red + median(votes))
    return Outcome(-math.expm1(-loss), shifts.above(-limit), shifts.above(limit + loss))


def chapter(
    model: Callable[[random.Random], Shifts], sessions: int, rng: random.Random
) -> Iterator[tuple[Outcome, Outcome]]:
    """Yield each case's outcomes with the chapter's spread and with the case's own spread."""
    cases = [model(rng) for _ in range(CHAPTER)]
    values = [[process_values(case, rng) for _ in range(sessions)] for case in cases]
    pool = stats.session_spread(values, SESSION)
    for case, mine in zip(cases, values, strict=True):
        value, own = fmean(map(fmean, mine)), stats.case_session_spread(mine, pool)
        yield judge(case, value, pool, rng), judge(case, value, own, rng)


def process_values(case: Shifts, rng: random.Random) -> list[float]:
    shift = case.draw(rng)
    return [shift + rng.gauss(0, SPREAD) for _ in range(PROCESSES)]


def cells(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the median of `detects`, and the shares of red 250-case runs and missed losses."""
    red, missed = fmean(o.red for o in outcomes), fmean(o.missed for o in outcomes)
    middle = median(o.detects for o in outcomes)
    return [f"{middle:.1%}", f"{1 - (1 - red) ** 250:.1%}", f"1 in {1 / max(missed, 1e-9):.0f}"]


def show(heads: Sequence[str], rows: Iterator[list[str]]) -> None:
    print("| " + " | ".join(heads) + " |")
    print("|" + " --- |" * len(heads))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)
    print()


def table(chapters: int) -> Iterator[list[str]]:
    """Yield the rows of the first table, by model and number of sessions."""
    shifts = [shift for *_, shift in stored_shifts()]
    kinds = {
        "alike, t(4)": alike,
        "cases differ, normal": unlike,
        "cases differ, t(4)": both,
        "resampled, alike": resampled(shifts),
        "resampled by case": resampled_cases(shifts),
    }
    for name, model in kinds.items():
        for sessions in COUNTS:
            rng = random.Random(f"{name}{sessions}")
            found = [both for _ in range(chapters) for both in chapter(model, sessions, rng)]
            pooled, own = zip(*found, strict=True)
            yield [name, str(sessions), *cells(pooled), *cells(own)]


def odd_cases(chapters: int) -> Iterator[list[str]]:
    """Yield the rows of the second table: every tenth case differs from its chapter."""
    for name, factor in (("a third", 1 / 3), ("three times", 3.0)):
        numbers = itertools.count()
        model = functools.partial(odd, numbers, factor)
        for sessions in COUNTS:
            rng = random.Random(f"{name}{sessions}")
            found = [list(chapter(model, sessions, rng))[::10] for _ in range(chapters)]
            pooled, own = zip(*itertools.chain(*found), strict=True)
            yield [name, str(sessions), *cells(pooled), *cells(own)]


def odd(numbers: Iterator[int], factor: float, rng: random.Random) -> Shifts:
    return heavy(SESSION * (1.0 if next(numbers) % 10 else factor))


def stored_shifts() -> Iterator[tuple[store.Stored, str, models.Result, float]]:
    """Yield the stored results of two sessions on the graph clock, and the shift of one session."""
    for path in sorted(BASELINES.glob("*/ch*.json")):
        stored = store.load(path)
        for key, result in stored.results.items():
            if result.clock == "graph" and result.sessions == 2:
                first, second = map(fmean, result.values)
                yield stored, key, result, (second - first) / math.sqrt(2)


def by_speedup() -> Iterator[list[str]]:
    """Yield the rows of the table of stored shifts by the size of ln(speedup)."""
    found = [(abs(result.value or 0.0), abs(shift)) for _, _, result, shift in stored_shifts()]
    for low, high in itertools.pairwise((0.0, 0.05, 0.2, 0.5, 1.0, math.inf)):
        mine = [shift for value, shift in found if low <= value < high]
        size = f"{low:g} to {high:g}"
        yield [size, str(len(mine)), f"{median(mine):.2%}", f"{stats.rms(mine):.2%}"]


def left_out() -> Iterator[list[str]]:
    """Yield the rows of the third table: each stored session is judged by the other session."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for stored, key, result, _ in stored_shifts():
        for kept in (0, 1):
            names = result.environments[kept : kept + 1]
            one = models.replace(result, values=(result.values[kept],), environments=names)
            others = [one if k == key else other for k, other in stored.results.items()]
            session = models.session_sd(others, "graph", one)
            margin = verdict.record_margin(result.own_spread or SPREAD, session, "graph")
            fall = fmean(result.values[kept]) - fmean(result.values[1 - kept])
            rows.setdefault(stored.product, []).append((margin, fall))
    for product, found in rows.items():
        reds = sum(fall > margin for margin, fall in found)
        near = max(fall / margin for margin, fall in found)
        middle = median(margin for margin, _ in found)
        yield [product, str(len(found)), f"{middle:.1%}", str(reds), f"{near:.2f}"]


def sized_session(results: Sequence[models.Result], mine: models.Result) -> float:
    """Return the spread between sessions of the other results with a speedup of this size."""
    sizes = [result for result in results if result is not mine and _size(result) == _size(mine)]
    return stats.session_spread([result.values for result in sizes], SESSION)


def _size(result: models.Result) -> int:
    return bisect_right(SIZES, abs(result.value or 0.0))


def sized() -> Iterator[list[str]]:
    """Yield the rows of the fifth table: `detects` with a spread by the size of ln(speedup)."""
    by_product: dict[str, list[models.Result]] = {}
    for path in sorted(BASELINES.glob("*/ch*.json")):
        results = [each for each in store.load(path).results.values() if each.clock == "graph"]
        by_product.setdefault(path.parent.name, []).extend(results)
    every = [result for results in by_product.values() for result in results if result.sessions > 1]
    for product, results in by_product.items():
        losses: list[list[float]] = [[] for _ in range(len(SIZES) + 1)]
        shifts: list[list[float]] = [[] for _ in losses]
        shares = []
        for result in results:
            spread, session = result.own_spread or SPREAD, sized_session(every, result)
            margin = verdict.record_margin(spread, session, "graph")
            loss = verdict.detectable(verdict.record_gates(0.0, margin), spread, session)
            losses[_size(result)].append(-math.expm1(-loss))
            if result.sessions == 2:
                first, second = map(fmean, result.values)
                shares.append(abs(second - first) / margin)
                shifts[_size(result)].append((second - first) / math.sqrt(2))
        yield [
            product,
            f"{median(itertools.chain(*losses)):.1%}",
            *(f"{median(each):.1%} of {len(each)}" for each in losses),
            " / ".join(f"{stats.rms(each):.2%}" for each in shifts if each),
            f"{sum(share > 1 for share in shares)} of {len(shares)}",
            f"{max(shares, default=0.0):.2f}",
        ]


def stored_detects() -> Iterator[list[str]]:
    """Yield the rows of the fourth table: the median `detects` of all stored results."""
    rows: dict[str, list[list[float]]] = {}
    for path in sorted(BASELINES.glob("*/ch*.json")):
        results = list(store.load(path).results.values())
        for result in (each for each in results if each.clock == "graph"):
            spread, found = result.own_spread or SPREAD, []
            for mine in (None, result):
                session = models.session_sd(results, "graph", mine)
                gates = verdict.record_gates(0.0, verdict.record_margin(spread, session, "graph"))
                found.append(-math.expm1(-verdict.detectable(gates, spread, session)))
            rows.setdefault(path.parent.name, []).append(found)
    for product, found in rows.items():
        yield [
            product,
            str(len(found)),
            *(f"{median(each):.1%}" for each in zip(*found, strict=True)),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--stored", action="store_true")
    options = parser.parse_args()
    three = ("detects", "red runs", "missed")
    heads = ("sessions", *(f"chapter: {h}" for h in three), *(f"case: {h}" for h in three))
    if not options.stored:
        chapters = 500 if options.full else 50
        show(("shifts", *heads), table(chapters))
        show(("the case's spread", *heads), odd_cases(chapters))
    show(("size of ln(speedup)", "cases", "median shift", "root mean square"), by_speedup())
    show(("product", "sessions left out", "margin", "red", "nearest"), left_out())
    show(("product", "stored cases", "chapter: detects", "case: detects"), stored_detects())
    sizes = (f"below {SIZES[0]:g}", f"{SIZES[0]:g} to {SIZES[1]:g}", "larger")
    show(("product", "detects", *sizes, "shifts", "red", "nearest"), sized())


if __name__ == "__main__":
    main()
