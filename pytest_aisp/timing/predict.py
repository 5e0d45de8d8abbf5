"""The time that a side's cost predicts, from the rates measured on this product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import hypot

from ..page.cost import HOST, UNITS, Cost, memory_rates
from .peaks import LATENCY, MEETINGS, RATES, SECONDS, Peaks

EXPLAINED = 0.25
"""A time is unexplained if it differs from the predicted time by more than this share."""


def explains(predicted: float, measured: float) -> bool:
    """Return whether a measured time is close to the predicted one."""
    return abs(measured - predicted) <= EXPLAINED * predicted


@dataclass(frozen=True)
class Prediction:
    """The minimum time of a call, in seconds.

    Attributes:
        parts: seconds by rate, the largest first. The parts of a phase overlap, so the sum of all
            parts may exceed `seconds`.
    """

    seconds: float
    parts: Mapping[str, float]

    @property
    def limit(self) -> str:
        """The rate that takes the most time."""
        return next(iter(self.parts), "")


class RateMissing(ValueError):
    """The rate `rate`, which a cost needs, was not measured on this product."""

    def __init__(self, rate: str, product: str) -> None:
        self.rate, command = rate, how_to_measure(rate)
        advice = f"; measure it there:\n    {command}" if command else "; no command measures it"
        super().__init__(f"the rate {rate!r} was not measured on {product}{advice}")


def how_to_measure(rate: str) -> str:
    """Return the command that measures and stores `rate`, or "" for a type without a peak."""
    if rate not in RATES:
        return ""
    if rate in ("peer", "peer_both"):
        return "aisp links bandwidth --store"
    return f"aisp {'links nccl' if rate in (*MEETINGS, 'busbw') else 'machine peak'} --store"


def predict(cost: Cost, peaks: Peaks, *, graph: bool) -> Prediction:
    """Return the time of a call that costs `cost`.

    In a CUDA graph, each kernel starts after the kernel before it, so start times and work add up.
    Without a graph, the host launches kernels while the GPU works, so only the longer of the two
    times counts. A wait for the GPU ends such an overlap.

    Raises:
        RateMissing: if a rate is missing. The message names the rate.
    """
    total, work, host = 0.0, 0.0, 0.0
    parts: dict[str, float] = {}
    for phase in cost.phases():
        resources = _seconds(phase, peaks)
        waits = {
            "all_reduce": phase.collectives,
            "barrier": phase.barriers,
            "graph_node": phase.graph_nodes,
        }
        waiting = _divide(waits, peaks)
        work += max((sum(times.values()) for times in resources), default=0.0)
        work += sum(waiting.values())
        if graph:
            steps = _divide({"graph_node": phase.launches}, peaks)
        else:
            steps = _divide({rate: getattr(phase, name) for name, rate in HOST.items()}, peaks)
        host += sum(steps.values())
        syncs = _divide({"sync": phase.syncs}, peaks)
        if syncs:
            total += _together(work, host, graph=graph) + syncs["sync"]
            work = host = 0.0
        for times in (*resources, waiting, steps, syncs):
            for rate, seconds in times.items():
                parts[rate] = parts.get(rate, 0.0) + seconds
    ordered = dict(sorted(parts.items(), key=lambda part: -part[1]))
    return Prediction(total + _together(work, host, graph=graph), ordered)


def _together(work: float, starts: float, *, graph: bool) -> float:
    return work + starts if graph else max(work, starts)


def _seconds(phase: Cost, peaks: Peaks) -> list[dict[str, float]]:
    """Return the seconds that `phase` uses each resource, keyed by rate. Resources overlap."""
    both = phase.h2d + phase.d2h if phase.h2d and phase.d2h else 0.0
    resources = (
        *({unit: getattr(phase, unit)} for unit in UNITS),
        phase.ops,
        {"h2d": phase.h2d},
        {"d2h": phase.d2h},
        {"pcie_both": both},
        {"peer": phase.sent},
        {"busbw": phase.nccl},
    )
    return [_memory_seconds(phase, peaks), *(_divide(one, peaks) for one in resources)]


def _memory_seconds(phase: Cost, peaks: Peaks) -> dict[str, float]:
    """Return the seconds of DRAM traffic, keyed by rate.

    If few bytes are in flight, latency limits the reads. Where latency and bandwidth take about
    equally long, requests also wait for each other, so the time is longer than both. The root of
    the sum of squares describes this: of the 19 stored times of `occupancy_ilp` in chapter 8 on an
    H100, it is within 15 % of 12 and within 25 % of 16. Bandwidth alone is within 25 % of 5.
    """
    seconds = _divide(memory_rates(phase.read, phase.write), peaks)
    if not phase.in_flight or not phase.read:
        return seconds
    busy = sum(seconds.values())
    waiting = _divide({LATENCY: phase.read / phase.in_flight}, peaks)[LATENCY]
    share = hypot(busy, waiting) / (busy + waiting)
    return {rate: share * each for rate, each in {**seconds, LATENCY: waiting}.items()}


def _divide(amounts: Mapping[str, float], peaks: Peaks) -> dict[str, float]:
    """Return the seconds that each nonzero amount takes at its rate."""
    seconds = {}
    for rate, amount in amounts.items():
        if not amount:
            continue
        if rate not in peaks.rates:
            raise RateMissing(rate, peaks.product)
        each = peaks.rates[rate]
        seconds[rate] = amount * each if rate in SECONDS else amount / each
    return seconds
