"""False and missed change points in simulated histories.

    python benchmarks/change_points.py           quick: 500 series per row
    python benchmarks/change_points.py --full    10,000, the table of docs/explanation/history.md

Each row is a kind of noise. For comparison, the plain method is binary segmentation alone: it
splits a series where the means of the two parts differ most, in standard errors of white noise. Its
threshold gives a false alarm in 1 % of series of white noise. Like ours, it ignores changes below 1
%.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pool
from statistics import NormalDist

from pytest_aisp.results.change_points import FLOOR, LEAST, change_points
from pytest_aisp.results.stats import INTERVAL

RUNS = 100
NEAR = 1
"""A planted change counts as found if a change at most this many runs away is found."""
Find = Callable[[Sequence[float], Sequence[float]], list[int]]


@dataclass(frozen=True)
class Model:
    """A kind of simulated history. All numbers are in ln(speedup).

    Attributes:
        spread: standard deviation of a value.
        phi: correlation of a value with the next one.
        spikes: the share of values that are off by `spike` in one direction.
        stored: the standard error that is stored with each value; by default `spread`.
        runs: the number of values.
        at, step: the position of a planted change, and its size.
        last: the number of values for which the planted change lasts; by default all.
        every_run: look for changes after every run, not only after the last one.
    """

    spread: float = 0.01
    phi: float = 0.0
    spikes: float = 0.0
    spike: float = 0.2
    stored: float | None = None
    runs: int = RUNS
    at: int | None = None
    step: float = 0.01
    last: int | None = None
    every_run: bool = False

    def series(self, rng: random.Random) -> tuple[list[float], list[float]]:
        """Return the values of a history, and their errors."""
        own = self.spread * math.sqrt(1 - self.phi**2)
        value, values = rng.gauss(0, self.spread), []
        for run in range(self.runs):
            spike = self.spike if rng.random() < self.spikes else 0.0
            values.append(value + spike + self._planted(run))
            value = self.phi * value + rng.gauss(0, own)
        return values, [self.stored or self.spread] * self.runs

    def _planted(self, run: int) -> float:
        if self.at is None or run < self.at or run >= self.at + (self.last or self.runs):
            return 0.0
        return self.step


SMALL = {"spread": 0.002, "spike": 0.04}
FALSE = {
    "white noise of 0.2 %": Model(**SMALL),
    "3 % spikes of 4 %": Model(**SMALL, spikes=0.03),
    "AR(0.7)": Model(**SMALL, phi=0.7),
    "white noise of 1 %": Model(),
    "noise of 1 %, 3 % spikes of 20 %": Model(spikes=0.03),
    "AR(0.7) of 1 %": Model(phi=0.7),
    "AR(0.7) of 1 %, stored error 0.3 %": Model(phi=0.7, stored=0.003),
    "white noise of 1 %, stored error 0.3 %": Model(stored=0.003),
    "white noise of 1 %, 20 runs": Model(runs=20),
    "AR(0.7) of 1 %, 20 runs": Model(phi=0.7, runs=20),
    "AR(0.7) of 1 %, 20 runs, stored error 0.3 %": Model(phi=0.7, runs=20, stored=0.003),
}
LOOKED = {
    "white noise of 1 %": Model(every_run=True),
    "noise of 1 %, 3 % spikes of 20 %": Model(spikes=0.03, every_run=True),
    "AR(0.7) of 1 %": Model(phi=0.7, every_run=True),
}
PLANTED = {
    "1 % at noise of 0.2 %, after 3 runs": Model(**SMALL, at=97),
    "1 % at noise of 0.2 %, after 5 runs": Model(**SMALL, at=95),
    "1 % at noise of 0.2 %, in the middle": Model(**SMALL, at=50),
    "1 % at noise of 0.2 %, 30 runs, after 3": Model(**SMALL, at=27, runs=30),
    "1 % at noise of 0.2 %, 3 % spikes, after 3 runs": Model(**SMALL, at=97, spikes=0.03),
    "1 % at noise of 0.2 %, 3 % spikes, after 5 runs": Model(**SMALL, at=95, spikes=0.03),
    "1 % with AR(0.7) of 0.2 %, in the middle": Model(**SMALL, at=50, phi=0.7),
    "5 % at noise of 0.2 %, after 2 runs": Model(**SMALL, at=98, step=0.05),
    "3 % for 10 runs, then back, noise of 0.2 %": Model(**SMALL, at=50, step=0.03, last=10),
}


def found(values: Sequence[float], errors: Sequence[float]) -> list[int]:
    """Return the positions that `change_points` finds."""
    return [change.at for change in change_points(values, errors)]


def plain(values: Sequence[float], errors: Sequence[float], start: int = 0) -> list[int]:
    """Return the positions that plain, non-robust binary segmentation finds."""
    count, total = len(values), math.fsum(values)
    best, where, part = 0.0, 0, 0.0
    for at, value in enumerate(values, start=1):
        part += value
        if LEAST <= at <= count - LEAST:
            gap = abs(part / at - (total - part) / (count - at))
            error = errors[0] * math.sqrt(1 / at + 1 / (count - at))
            if gap + INTERVAL * error >= FLOOR and gap / error > best:
                best, where = gap / error, at
    if best < NormalDist().inv_cdf(1 - 0.005 / max(1, RUNS - 2 * LEAST + 1)):
        return []
    left = plain(values[:where], errors, start)
    return [*left, start + where, *plain(values[where:], errors, start + where)]


def trial(model: Model, find: Find, seed: int, count: int) -> int:
    """Return how many of `count` series have a detected change, near the planted one if any."""
    rng, hits = random.Random(seed), 0
    for _ in range(count):
        values, errors = model.series(rng)
        lengths = range(2 * LEAST, len(values) + 1) if model.every_run else [len(values)]
        at = model.at
        hits += any(
            at is None or abs(place - at) <= NEAR
            for length in lengths
            for place in find(values[:length], errors[:length])
        )
    return hits


def rates(
    models: dict[str, Model], count: int, heads: Sequence[str], methods: Sequence[Find]
) -> None:
    """Print a table of the number and share of series in which each method finds a change."""
    print("\n| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads))
    parts = 20
    for name, model in models.items():
        cells = [name, str(count)]
        for find in methods:
            with Pool() as pool:
                jobs = [(model, find, seed, count // parts) for seed in range(parts)]
                hits = sum(pool.starmap(trial, jobs))
            cells += [str(hits), f"{hits / count:.2%}"]
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    count = 10_000 if parser.parse_args().full else 500
    both = found, plain
    rates(FALSE, count, ("noise", "series", "false", "", "plain: false", ""), both)
    looked = "looked at after every run", "series", "false", "", "plain", ""
    rates(LOOKED, count // 10, looked, both)
    rates(PLANTED, count, ("planted change", "series", "found", "", "plain: found", ""), both)


if __name__ == "__main__":
    main()
