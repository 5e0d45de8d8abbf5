"""The time that a side's cost predicts, from the rates measured on this product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..page.cost import Cost, memory_rates
from .peaks import LINKS, SECONDS, Peaks

EXPLAINED = 0.25
"""A time is unexplained if it differs from the predicted time by more than this share of it."""


@dataclass(frozen=True)
class Prediction:
    """The least time of a call, in seconds.

    Attributes:
        parts: seconds by rate, the largest first. They overlap within a phase, so their sum may be
            longer than `seconds`.
    """

    seconds: float
    parts: Mapping[str, float]

    @property
    def limit(self) -> str:
        """The rate that takes the most time."""
        return next(iter(self.parts), "")

    def explains(self, seconds: float) -> bool:
        """Return whether the measured `seconds` are close to the predicted ones."""
        return abs(seconds / self.seconds - 1) <= EXPLAINED


class RateMissing(ValueError):
    """A rate that a cost needs was not measured on this product."""


def predict(cost: Cost, peaks: Peaks, *, graph: bool) -> Prediction:
    """Return the time of a call that costs `cost`.

    In a graph, each kernel starts after the one before it, so starts and work add up. Without one,
    the host launches kernels while the GPU works, so the longer of the two counts.

    Raises:
        RateMissing: if a rate is missing. The message names it.
    """
    work, starts = 0.0, 0.0
    parts: dict[str, float] = {}
    for phase in cost.phases():
        resources = _seconds(phase, peaks)
        work += max((sum(times.values()) for times in resources), default=0.0)
        start = {"graph_node" if graph else "launch": phase.launches}
        waits = {"all_reduce": phase.collectives}
        launching, waiting = _divide(start, peaks), _divide(waits, peaks)
        starts += sum(launching.values())
        work += sum(waiting.values())
        for times in (*resources, launching, waiting):
            for rate, seconds in times.items():
                parts[rate] = parts.get(rate, 0.0) + seconds
    ordered = dict(sorted(parts.items(), key=lambda part: -part[1]))
    return Prediction(work + starts if graph else max(work, starts), ordered)


def _seconds(phase: Cost, peaks: Peaks) -> list[dict[str, float]]:
    """Return the seconds by rate of each resource that `phase` uses. Resources overlap."""
    link = max(LINKS, key=lambda rate: peaks.rates.get(rate, 0.0))
    resources = (
        memory_rates(phase.read, phase.write),
        phase.ops,
        {"h2d": phase.h2d},
        {"d2h": phase.d2h},
        {link: phase.sent},
    )
    return [_divide(one, peaks) for one in resources]


def _divide(amounts: Mapping[str, float], peaks: Peaks) -> dict[str, float]:
    """Return the seconds that each of `amounts` takes, without those that are zero."""
    seconds = {}
    for rate, amount in amounts.items():
        if not amount:
            continue
        if rate not in peaks.rates:
            raise RateMissing(
                f"the rate {rate!r} was not measured on {peaks.product}; measure it there:\n"
                "    aisp machine peak --store"
            )
        each = peaks.rates[rate]
        seconds[rate] = amount * each if rate in SECONDS else amount / each
    return seconds
