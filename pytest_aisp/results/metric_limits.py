"""Metrics besides time that a page may limit: memory, launches, energy and goodput.

Noise of a metric counts in favor of the optimized side: a limit is missed only if the amount is
beyond it by more than the noise. What an allocator takes from the GPU differs between boards, so a
stored amount of one session has a larger margin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from .row import amount

Amounts = Mapping[str, float]
"""The amount per call of ``baseline`` and ``optimized``, and the relative ``noise`` of both."""
Name = Literal["memory", "reserved", "fragmentation", "launches", "energy", "goodput"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        what: the words that follow the amounts in a message.
        assertion: the method of `pair` that limits it.
        unit: function that formats one amount.
        relative: True if the limit is a share of the baseline's amount.
        margin, slack: the allowed loss against the stored amount: the share `margin` of it, plus
            the amount `slack`.
        rises: True if a larger amount is better.
        one_session: the share that is allowed if the stored amount is of one session.
        exact: True if two processes always count the same.
    """

    what: str
    assertion: str
    unit: Callable[[float], str]
    relative: bool
    margin: float
    slack: float
    rises: bool = False
    one_session: float = 0.0
    exact: bool = False

    def describe(self, amounts: Amounts, limit: float) -> str:
        """Return the text with both amounts and the limit."""
        both = f"{self.both(amounts)} {self.what}"
        noise = f", noise {amounts['noise']:.1%}" if "noise" in amounts else ""
        if not self.relative:
            return f"{both}, against {self.unit(limit)}{noise}"
        share = amounts["optimized"] / (amounts["baseline"] or 1)
        return f"{both}, {share:.3g} of the baseline's against {limit:g}{noise}"

    def both(self, amounts: Amounts) -> str:
        """Return the amounts of both sides, such as ``600 MiB / 240 MiB``."""
        return f"{self.unit(amounts['baseline'])} / {self.unit(amounts['optimized'])}"

    def missed(self, amounts: Amounts, limit: float) -> bool:
        """Return whether the optimized side breaks `limit`."""
        limit *= amounts["baseline"] if self.relative else 1
        return self._beyond(amounts["optimized"], limit, amounts.get("noise", 0.0))

    def worse(self, before: Amounts, amounts: Amounts, sessions: int = 2) -> bool:
        """Return whether the optimized side is worse than `before`, beyond margin and noise.

        Args:
            sessions: the number of sessions that `before` was counted in.
        """
        sign = -1 if self.rises else 1
        margin = max(self.margin, self.one_session if sessions < 2 else 0.0)
        limit = before["optimized"] * (1 + sign * margin) + sign * self.slack
        noise = before.get("noise", 0.0) + amounts.get("noise", 0.0)
        return self._beyond(amounts["optimized"], limit, noise)

    def _beyond(self, now: float, limit: float, noise: float) -> bool:
        return now * (1 + noise) < limit if self.rises else now * (1 - noise) > limit


def pooled(amounts: Sequence[Amounts]) -> Amounts:
    """Return the median amount of each side. Half of their relative range is noise."""
    if len(amounts) == 1:
        return amounts[0]
    roles = ("baseline", "optimized")
    result = {role: float(median(each[role] for each in amounts)) for role in roles}
    noise = max(each.get("noise", 0.0) for each in amounts)
    for role, middle in result.items():
        values = [each[role] for each in amounts]
        noise = max(noise, (max(values) - min(values)) / 2 / middle if middle else 0.0)
    return {**result, "noise": noise} if noise else result


def shares(busy: Amounts, seconds: Sequence[float]) -> dict[str, float]:
    """Return, by side, the share of a call's `seconds` in which the GPU is `busy`; at most 1.

    Under the profiler the GPU's clocks may differ, so kernels can seem busy for longer than a call.
    """
    both = zip(("baseline", "optimized"), seconds, strict=True)
    return {role: min(1.0, busy[role] / lasts) for role, lasts in both}


def joules(value: float) -> str:
    """Return an energy with three digits and a suitable unit, such as ``1.23 mJ``."""
    for unit, scale in (("J", 1.0), ("mJ", 1e-3), ("uJ", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e9:.3g} nJ"


def check_goals(goals: Mapping[str, Amounts]) -> None:
    """Raise ValueError if a metric is unknown, or if an amount of it is missing or unknown."""
    for metric, amounts in goals.items():
        if metric not in METRICS or amounts.keys() - {"noise"} != {"baseline", "optimized"}:
            legal = f"by {' or '.join(METRICS)}, amounts of baseline and optimized, and noise"
            raise ValueError(f"goals={goals} must be {legal}")


# The margins allow for the allocator, which reserves segments of 2 or 20 MiB, and for libraries,
# which may choose another workspace.
_ALLOCATED, _SEGMENTS = (0.01, 1 << 20), (0.01, 40 << 20)
_BOARDS = 0.5  # two H200s had 352 and 480 MiB of fragmentation in the same case
METRICS: dict[str, Metric] = {
    "memory": Metric("beyond the inputs", "assert_memory", amount, True, *_ALLOCATED),
    "reserved": Metric(
        "taken from the GPU", "assert_memory", amount, True, *_SEGMENTS, one_session=_BOARDS
    ),
    "fragmentation": Metric(
        "taken and unused", "assert_memory", amount, True, *_SEGMENTS, one_session=_BOARDS
    ),
    "launches": Metric(
        "launches a call", "assert_launches", "{:g}".format, False, 0.0, 0.0, exact=True
    ),
    # Leakage grows with temperature, and two GPUs of one product use different amounts of power.
    "energy": Metric("a call", "assert_energy", joules, True, 0.05, 0.0),
    # Data loaders and hosts vary more than GPU clocks.
    "goodput": Metric(
        "at compute", "assert_goodput", "{:.0%}".format, False, 0.05, 0.0, rises=True
    ),
}
