"""The schedule: windows into ABBA blocks, blocks into one process's samples.

A `Bout` is two subjects ready on one clock: a pair of windows. This module only decides in which
order the windows run, so that it is the same on a GPU, a CPU and the simulated device.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, Protocol

from ..results.stats import block_value, process_error, process_value

ROBUST_CLOCKS = ("host", "cpu", "process")
"""Clocks whose process value is the median of the blocks, not the mean of their middle half."""

MOST_STEPS = 16
"""Most steps in a window of a training step: the state after it is compared with the reference."""

MOST_DROPPED = 20
"""Disturbed blocks after which a measurement gives up."""


class Window(Protocol):
    """Time one window of `calls` calls and return seconds per counted call.

    Attributes:
        counted: the calls that the time is divided by: all, unless a slowdown is planted.
        repeats: how often the calls run for one timing; a timed replay follows an untimed one.
    """

    calls: int
    counted: int
    repeats: int

    def __call__(self) -> float: ...


class PairTimer(Protocol):
    """Two sides ready to be timed against each other on one clock."""

    clock: str

    @property
    def windows(self) -> tuple[Window, Window]: ...

    def refresh(self, *, last: bool) -> None:
        """Rewrite the inputs' values in place and poison the outputs."""

    def disturbance(self) -> str | None:
        """Name what disturbed the windows since the last call, or None."""

    def other(self) -> dict[str, Any]:
        """Return the times on the clock that does not judge; may run the sides again."""

    def details(self) -> dict[str, Any]:
        """Return facts of JSON types for the row: slots, calls, clocks, allocations."""


@dataclass(frozen=True)
class Budget:
    """How long to measure, fixed before the first block.

    Attributes:
        blocks: most blocks.
        laps: how often both sides are built and captured anew, where that is cheap. Most of the
            spread between processes turned out to be spread between captures (spread.md).
        seconds: what the blocks may take together.
        window: least seconds a window lasts (None: the clock's own).
        warmup: least calls a side is warmed with.
        least: blocks that are always run.
    """

    blocks: int = 20
    laps: int = 4
    seconds: float = 0.2
    window: float | None = None
    warmup: int = 3
    least: int = 6

    def count(self, block_seconds: float) -> int:
        """Return the number of blocks: as many as fit, between `least` and `blocks`."""
        fit = int(self.seconds / max(block_seconds, 1e-9))
        return max(min(self.least, self.blocks), min(fit, self.blocks))

    def exactly(self, blocks: int) -> Budget:
        """Return this budget for just so many blocks."""
        return replace(self, blocks=blocks, least=blocks)

    def lap(self, laps: int | None = None) -> Budget:
        """Return the budget of one lap of `laps`."""
        laps = laps or self.laps
        share = {"blocks": self.blocks, "least": self.least}
        return replace(
            self,
            laps=1,
            seconds=self.seconds / laps,
            **{name: max(1, -(-n // laps)) for name, n in share.items()},
        )


@dataclass(frozen=True)
class Samples:
    """What one process measured.

    Attributes:
        clock: ``graph``, ``queue``, ``host``, ``cpu``, ``process``.
        blocks: ln(speedup) of each block.
        baseline, optimized: seconds per call, each window in the order it ran.
        orders: ``ABBA`` or ``BAAB``, by block.
        dropped: causes of the blocks that were measured again.
        dropped_at: how many blocks there were before each of these.
        details: facts from the bout.
        laps: ln(speedup) of each lap.
        firsts: by block, which side its lap built first.
    """

    clock: str
    blocks: list[float]
    baseline: list[float]
    optimized: list[float]
    orders: list[str]
    dropped: list[str]
    details: dict[str, Any]
    laps: list[float] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    dropped_at: list[int] = field(default_factory=list)

    @property
    def value(self) -> float:
        """ln(speedup) of this process."""
        return process_value(self.blocks, self.firsts, robust=self.clock in ROBUST_CLOCKS)

    @property
    def error(self) -> float:
        """Standard error of `value` as the laps show it; 0 with fewer than three."""
        return process_error(self.blocks, len(self.laps), self.firsts)


def join(parts: Sequence[Samples]) -> Samples:
    """Return the samples of several laps as those of one process."""
    joined: dict[str, Any] = {f.name: getattr(parts[-1], f.name) for f in fields(Samples)}
    for name in ("blocks", "baseline", "optimized", "orders", "dropped", "laps", "firsts"):
        joined[name] = [value for part in parts for value in getattr(part, name)]
    joined["details"] = {k: v for part in parts for k, v in part.details.items()}
    before = list(accumulate((len(part.blocks) for part in parts), initial=0))
    both = list(zip(before, parts, strict=False))
    joined["dropped_at"] = [n + at for n, part in both for at in part.dropped_at]
    looks = [[n + at, *seen] for n, p in both for at, *seen in p.details.get("looks", ())]
    joined["details"] |= {"looks": looks} if looks else {}
    if counts := [p.details["housekeeping"] for p in parts if "housekeeping" in p.details]:
        total = {name: sum(count[name] for count in counts) for name in counts[0]}
        joined["details"]["housekeeping"] = total
    return Samples(**joined)


class Disturbed(RuntimeError):
    """Too many blocks were disturbed by a named cause."""


def measure(bout: PairTimer, budget: Budget, rng: random.Random, first: int = 0) -> Samples:
    """Run the blocks of `bout` and return its samples.

    The number of blocks is fixed after one discarded block. A block is dropped only for a cause
    that the bout names, and measured again.

    Args:
        first: the side that was built first.

    Raises:
        Disturbed: when `MOST_DROPPED` blocks were dropped.
    """
    trial = _block(bout, "ABBA")
    bout.disturbance()
    spent = (
        w.repeats * w.counted * sum(times) for w, times in zip(bout.windows, trial, strict=True)
    )
    count = budget.count(sum(spent))
    orders = _orders(count, rng)
    refreshed = {0, count - 1, *rng.sample(range(count), min(2, count))}
    samples = Samples(bout.clock, [], [], [], [], [], {})
    while len(samples.blocks) < count:
        if len(samples.blocks) in refreshed:
            bout.refresh(last=len(samples.blocks) == count - 1)
        order = orders[len(samples.blocks)]
        baseline, optimized = _block(bout, order)
        cause = bout.disturbance()
        if cause is not None:
            samples.dropped.append(cause)
            samples.dropped_at.append(len(samples.blocks))
            if len(samples.dropped) >= MOST_DROPPED:
                raise Disturbed(f"{len(samples.dropped)} blocks were disturbed: {cause}")
            continue
        samples.blocks.append(block_value(baseline, optimized))
        samples.baseline.extend(baseline)
        samples.optimized.extend(optimized)
        samples.orders.append(order)
    samples.details.update(bout.details())
    if looks := samples.details.get("looks"):
        samples.details["looks"] = [[_kept(at, samples), *seen] for at, *seen in looks]
    samples.firsts.extend([first] * count)
    samples.laps.append(samples.value)
    return samples


def _orders(count: int, rng: random.Random) -> list[str]:
    """Return `count` orders at random, each pair of neighbours one of either kind."""
    orders: list[str] = []
    while len(orders) < count:
        orders += rng.sample(["ABBA", "BAAB"], 2)
    return orders[:count]


def _kept(asked: int, samples: Samples) -> int:
    """Return how many blocks were kept when the bout was asked for the `asked`-th time.

    It is asked after the discarded block too, and after those that are measured again.
    """
    kept = max(asked - 1, 0)
    for at in samples.dropped_at:
        kept -= at < kept
    return kept


def _block(bout: PairTimer, order: str) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = ([], [])
    for letter in order:
        side = "AB".index(letter)
        times[side].append(bout.windows[side]())
    return times


def settle(
    calls: Sequence[Callable[[], float]],
    grew: Callable[[], bool],
    *,
    least: int,
    seconds: float,
    clock: Callable[[], float],
) -> int:
    """Warm both sides in turn until they are steady; return how many rounds it took.

    Steady means: at least `least` rounds, no growth (`grew`: new allocations, modules) in the last
    one, and each side's last three times within 10 % of the three before. Gives up after `seconds`.
    """
    start, history = clock(), [list[float]() for _ in calls]
    rounds = 0
    while True:
        for side, call in zip(history, calls, strict=True):
            side.append(call())
        rounds += 1
        steady = not grew() and all(_steady(side) for side in history)
        if rounds >= least and (steady or clock() - start > seconds):
            return rounds


def _steady(times: Sequence[float]) -> bool:
    if len(times) < 6:
        return False
    before, now = sorted(times[-6:-3])[1], sorted(times[-3:])[1]
    return abs(now - before) <= 0.10 * before


PLANTABLE = 0.85, 1.35
"""A window may hold this many times the wanted calls to plant a slowdown exactly."""
LONG, FEW_SLOTS = 5e-3, 2
"""Seconds of a call that need not go through all slots to find the L2 cold, and those that do for
it: bringing 60 MB of L2 from memory takes an H200 0.3 % of that."""


def calls_a_round(seconds_per_call: float, slots: int) -> int:
    """Return how many calls make a round: one a slot, or two slots' where a call is long."""
    return min(slots, FEW_SLOTS) if seconds_per_call >= LONG else slots


def calls_for(seconds_per_call: float, window: float, slots: int) -> int:
    """Return how many calls fill `window` seconds best: whole rounds, at least one.

    The nearest, so that both sides' windows last alike: what starting one costs is then the same.
    """
    calls = calls_a_round(seconds_per_call, slots)
    rounds = max(1, round(window / max(seconds_per_call * calls, 1e-9)))
    return min(rounds, 100_000) * calls


def extra_calls(counted: int, planted: float) -> int:
    """Return how many calls beside `counted` plant a slowdown of at least the share `planted`."""
    return math.ceil(counted * planted - 1e-9)


def calls_to_plant(calls: int, slots: int, planted: float) -> int:
    """Return how many calls, near `calls`, let whole extra calls plant `planted` most exactly.

    A multiple of `slots`; 100 calls plant 1 %, 101 would plant 2 %.
    """
    if not planted:
        return calls
    first = math.ceil(PLANTABLE[0] * calls / slots) * slots
    near = range(first, max(first, math.floor(PLANTABLE[1] * calls)) + 1, slots)
    return min(near, key=lambda n: (extra_calls(n, planted) / n, abs(n - calls)))
