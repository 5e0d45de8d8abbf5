"""The metrics other than time that a page may limit: memory, launches, energy and goodput.

Counted amounts vary too. For example, the memory that an allocator takes from the GPU differs
between processes and between boards. So results are recorded from several processes and sessions,
and the spread of the counts gives the margin against a stored amount. A metric that is the same in
all processes, such as launches, has no margin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from .row import amount

Amounts = Mapping[str, float]
"""The amount per call of ``baseline`` and ``optimized``, and the relative ``noise`` of both.

`noise` is half the relative range of several counts, or the noise of a single count. ``processes``
is the number of counts if there are several.
"""
ROLES, SIGNS = ("baseline", "optimized"), (-1, 1)
Name = Literal["memory", "reserved", "fragmentation", "launches", "energy", "goodput"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        what: the words that follow the amounts in a message.
        assertion: the method of `pair` that limits the metric.
        unit: function that formats one amount.
        relative: True if the limit is a share of the baseline's amount.
        margin, slack: a share of the stored amount, and a fixed amount, which together are the loss
            that is allowed even without noise.
        rises: True if a larger amount is better.
        one_session: the smallest allowed loss, as a share, if the stored amount comes from one
            session. For S sessions, the share is divided by S.
    """

    what: str
    assertion: str
    unit: Callable[[float], str]
    relative: bool
    margin: float
    slack: float
    rises: bool = False
    one_session: float = 0.0

    def describe(self, amounts: Amounts, limit: float) -> str:
        """Return a message with the amounts of both sides and the limit."""
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

    def worse(self, before: Amounts, amounts: Amounts, sessions: int = 1) -> bool:
        """Return whether the optimized side is worse than `before`, beyond margin and noise.

        Args:
            sessions: the number of sessions in which `before` was counted.
        """
        sign = -1 if self.rises else 1
        share = self.allowed(before, sessions)
        limit = before["optimized"] * (1 + sign * share) + sign * self.slack
        return self._beyond(amounts["optimized"], limit, amounts.get("noise", 0.0))

    def allowed(self, before: Amounts, sessions: int) -> float:
        """Return the largest allowed loss without `slack`, as a share of the amount `before`.

        A few counts cover only part of the range of all possible counts. So half of the counts'
        range is multiplied by 1.5 + 3 / (N - 1), for N sessions, or for N processes of a single
        session.
        """
        count = sessions if sessions > 1 else before.get("processes", 1)
        spread = before.get("noise", 0.0) * (1.5 + 3 / (count - 1) if count > 1 else 1)
        return max(self.margin + spread, self.one_session / sessions)

    def _beyond(self, now: float, limit: float, noise: float) -> bool:
        return now * (1 + noise) < limit if self.rises else now * (1 - noise) > limit


def pooled(amounts: Sequence[Amounts]) -> Amounts:
    """Return each side's median amount over processes. The noise is half of the range."""
    if len(amounts) == 1:
        return amounts[0]
    return _around({role: median(each[role] for each in amounts) for role in ROLES}, amounts)


def with_session(stored: Amounts, sessions: int, new: Amounts) -> Amounts:
    """Return the mean over the `sessions` sessions in `stored` and the new session `new`.

    The noise is half of the range."""
    means = {role: (sessions * stored[role] + new[role]) / (sessions + 1) for role in ROLES}
    return _around(means, [stored, new])


def _around(middles: Mapping[str, float], amounts: Sequence[Amounts]) -> Amounts:
    noise = 0.0
    for role, middle in middles.items():
        ends = [
            each[role] * (1 + sign * each.get("noise", 0)) for each in amounts for sign in SIGNS
        ]
        noise = max(noise, (max(ends) - min(ends)) / 2 / middle if middle else 0.0)
    result = {role: float(middle) for role, middle in middles.items()}
    result |= {"noise": noise} if noise else {}
    return {**result, "processes": sum(each.get("processes", 1) for each in amounts)}


def shares(busy: Amounts, seconds: Sequence[float]) -> dict[str, float]:
    """Return each side's share of a call's time during which the GPU computes, at most 1.

    Args:
        busy: the GPU's busy seconds in a call under the profiler, by side. The busy seconds can
            exceed the call's time, because the GPU's clock rate may be lower under the profiler.
        seconds: each side's seconds per call, without the profiler.
    """
    both = zip(ROLES, seconds, strict=True)
    return {role: min(1.0, busy[role] / lasts) for role, lasts in both}


def joules(value: float) -> str:
    """Return an energy with three digits and a suitable unit, such as ``1.23 mJ``."""
    for unit, scale in (("J", 1.0), ("mJ", 1e-3), ("uJ", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e9:.3g} nJ"


def check_goals(goals: Mapping[str, Amounts]) -> None:
    """Raise ValueError if a metric is unknown, or if one of its amounts is missing or unknown."""
    for metric, amounts in goals.items():
        if metric not in METRICS or amounts.keys() - {"noise", "processes"} != set(ROLES):
            legal = f"by {' or '.join(METRICS)}, amounts of baseline and optimized,"
            legal += " and noise and processes"
            raise ValueError(f"goals={goals} must be {legal}")


# The margins allow for the allocator, which reserves segments of 2 or 20 MiB, and for libraries,
# which may choose another workspace.
_ALLOCATED, _SEGMENTS = (0.01, 1 << 20), (0.01, 40 << 20)
_BOARDS = 0.5  # for the same case, two H200s had 352 and 480 MiB of fragmentation
METRICS: dict[str, Metric] = {
    "memory": Metric("beyond the inputs", "assert_memory", amount, True, *_ALLOCATED),
    "reserved": Metric(
        "taken from the GPU", "assert_memory", amount, True, *_SEGMENTS, one_session=_BOARDS
    ),
    "fragmentation": Metric(
        "taken and unused", "assert_memory", amount, True, *_SEGMENTS, one_session=_BOARDS
    ),
    "launches": Metric("launches a call", "assert_launches", "{:g}".format, False, 0.0, 0.0),
    # Leakage grows with temperature, and two GPUs of one product use different amounts of power.
    "energy": Metric("a call", "assert_energy", joules, True, 0.05, 0.0),
    # Data loaders and hosts vary more than GPU clocks.
    "goodput": Metric(
        "at compute", "assert_goodput", "{:.0%}".format, False, 0.05, 0.0, rises=True
    ),
}
