"""The schedule of one process: windows form ABBA blocks, and blocks form the samples.

This module decides only the order and the number of windows and calls, so it works the same on a
GPU, a CPU, and the simulated device.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from ..isolation.interference import Cause, Disturbed
from ..page.pair import SideError
from ..results.stats import block_value, process_error, process_value
from ..util.process_group import current_group

if TYPE_CHECKING:
    from ..results.messages import Json

ROBUST_CLOCKS = ("host", "cpu", "process")
"""Clocks on which a process's value is the median of all its blocks."""
MOST_STEPS = 16
"""The maximum number of training steps per window. The reference repeats all steps."""
MOST_DROPPED = 20
"""A measurement fails when this many blocks were disturbed."""
FEW_DROPPED, DROPPED_SECONDS = 3, 10.0
"""A measurement also fails when this many blocks were disturbed and took this many seconds."""
LISTS = ("blocks", "baseline", "optimized", "orders", "dropped", "laps", "firsts")
"""Fields of `Samples` that are lists, which `join` concatenates."""


class Window(Protocol):
    """Time one window of `calls` calls and return seconds per counted call.

    Attributes:
        calls: number of calls that are timed.
        counted: number that the time is divided by. It is less than `calls` if a slowdown is
            planted.
        repeats: a window's time divided by the time of its calls: 2 if an untimed replay comes
            first.
    """

    calls: int
    counted: int
    repeats: int

    def __call__(self) -> float: ...


class PairTimer(Protocol):
    """Two sides that are ready to be timed on one clock."""

    clock: str

    @property
    def windows(self) -> tuple[Window, Window]: ...

    def refresh(self, *, last: bool) -> None:
        """Write new values into the inputs in place, and overwrite the outputs with NaN."""

    def disturbance(self) -> Cause | None:
        """Return the cause that disturbed windows since the previous call, or None."""

    def details(self) -> dict[str, object]:
        """Return facts for the row, in JSON types: slots, calls, clocks, allocations."""


@dataclass(frozen=True)
class Budget:
    """The length of a measurement, fixed before the first block.

    Attributes:
        blocks: maximum number of blocks.
        laps: number of times that both sides are built and captured, if that is cheap. Most of the
            spread between processes comes from their captures (spread.md).
        seconds: time for all blocks together.
        window: minimum length of a window in seconds, or None for the clock's default.
        warmup: minimum number of calls to warm up a side.
        least: minimum number of blocks, even if they take longer than `seconds`.
    """

    blocks: int = 20
    laps: int = 4
    seconds: float = 0.2
    window: float | None = None
    warmup: int = 3
    least: int = 6

    def count(self, block_seconds: float) -> int:
        """Return the number of blocks that fit, between `least` and `blocks`."""
        fit = int(self.seconds / max(block_seconds, 1e-9))
        return max(min(self.least, self.blocks), min(fit, self.blocks))

    def exactly(self, blocks: int) -> Budget:
        """Return this budget, but with exactly `blocks` blocks."""
        return replace(self, blocks=blocks, least=blocks)

    def lap(self, laps: int | None = None) -> Budget:
        """Return the budget of a single lap if there are `laps` laps."""
        laps = laps or self.laps
        return replace(
            self,
            laps=1,
            seconds=self.seconds / laps,
            blocks=max(1, math.ceil(self.blocks / laps)),
            least=max(1, math.ceil(self.least / laps)),
        )


@dataclass(frozen=True)
class Samples:
    """The measurements of one process.

    Attributes:
        clock: ``graph``, ``queue``, ``host``, ``cpu`` or ``process``.
        blocks: ln(speedup) of each block.
        baseline, optimized: seconds per call of each window, in the order they ran.
        orders: order of each block, ``ABBA`` or ``BAAB``.
        dropped: the cause of the disturbance of each dropped block.
        details: facts from the timer.
        laps: ln(speedup) of each lap.
        firsts: the side that was built first in each block's lap.
        dropped_at: the number of valid blocks before each dropped block.
    """

    clock: str
    blocks: list[float] = field(default_factory=list)
    baseline: list[float] = field(default_factory=list)
    optimized: list[float] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    details: dict[str, Json] = field(default_factory=dict)
    laps: list[float] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    dropped_at: list[int] = field(default_factory=list)

    @property
    def value(self) -> float:
        """ln(speedup) of this process."""
        return process_value(self.blocks, self.firsts, robust=self.clock in ROBUST_CLOCKS)

    @property
    def error(self) -> float:
        """Standard error of `value`, computed from the laps, or 0 for fewer than three laps."""
        return process_error(self.blocks, len(self.laps), self.firsts)


def join(parts: Sequence[Samples]) -> Samples:
    """Combine the samples of several laps into the samples of one process."""
    joined, housekeeping = Samples(parts[0].clock), Counter[str]()
    looks: list[Json] = []
    for part in parts:
        before = len(joined.blocks)
        for name in LISTS:
            getattr(joined, name).extend(getattr(part, name))
        joined.dropped_at.extend(before + at for at in part.dropped_at)
        joined.details.update(part.details)
        looks += [[before + at, *seen] for at, *seen in part.details.get("looks", ())]
        housekeeping.update(part.details.get("housekeeping", {}))
    if looks:
        joined.details["looks"] = looks
    if housekeeping:
        joined.details["housekeeping"] = dict(housekeeping)
    return joined


def measure(timer: PairTimer, budget: Budget, rng: random.Random, first: int = 0) -> Samples:
    """Run the blocks of `timer` and return its samples.

    The first block is discarded, but its time determines the number of blocks. A block is dropped
    and measured again only if the timer reports what disturbed it.

    Args:
        first: the side that was built first.

    Raises:
        Disturbed: if the machine disturbed `MOST_DROPPED` blocks.
        SideError: if a side itself disturbed these blocks, as with an import in every call.
    """
    trial = _block(timer, "ABBA")
    timer.disturbance()
    seconds = (
        w.repeats * w.counted * sum(times) for w, times in zip(timer.windows, trial, strict=True)
    )
    count = budget.count(sum(seconds))
    orders = _orders(count, rng)
    refreshed = {0, count - 1, *rng.sample(range(count), min(2, count))}
    samples, dropped_seconds = Samples(timer.clock), 0.0
    while len(samples.blocks) < count:
        if len(samples.blocks) in refreshed:
            timer.refresh(last=len(samples.blocks) == count - 1)
        order, start = orders[len(samples.blocks)], time.perf_counter()
        baseline, optimized = _block(timer, order)
        cause = timer.disturbance()
        if cause is not None:
            samples.dropped.append(cause.text)
            samples.dropped_at.append(len(samples.blocks))
            dropped_seconds += time.perf_counter() - start
            _give_up(cause, len(samples.dropped), dropped_seconds)
            continue
        samples.blocks.append(block_value(baseline, optimized))
        samples.baseline.extend(baseline)
        samples.optimized.extend(optimized)
        samples.orders.append(order)
    samples.details.update(timer.details())
    if looks := samples.details.get("looks"):
        samples.details["looks"] = [[_valid_blocks(at, samples), *seen] for at, *seen in looks]
    samples.firsts.extend([first] * count)
    samples.laps.append(samples.value)
    return samples


def _give_up(cause: Cause, dropped: int, seconds: float) -> None:
    """Raise an error if too many blocks were dropped, or too much time is lost."""
    slow = dropped >= FEW_DROPPED and current_group().max(seconds) > DROPPED_SECONDS
    if dropped < MOST_DROPPED and not slow:
        return
    message = f"{dropped} blocks were disturbed: {cause.text}"
    raise Disturbed(message) if cause.machine else SideError(message)


def _orders(count: int, rng: random.Random) -> list[str]:
    """Return `count` random orders. Every two successive blocks have one ABBA and one BAAB."""
    orders: list[str] = []
    while len(orders) < count:
        orders += rng.sample(["ABBA", "BAAB"], 2)
    return orders[:count]


def _valid_blocks(call: int, samples: Samples) -> int:
    """Return how many blocks were valid when `PairTimer.disturbance` was called the `call`-th time.

    `disturbance` is also called after the discarded block and after dropped blocks.
    """
    valid = max(call - 1, 0)
    for at in samples.dropped_at:
        valid -= at < valid
    return valid


def _block(timer: PairTimer, order: str) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = ([], [])
    for letter in order:
        side = "AB".index(letter)
        times[side].append(timer.windows[side]())
    return times


def settle(
    calls: Sequence[Callable[[], float]],
    grew: Callable[[], bool],
    *,
    least: int,
    seconds: float,
) -> int:
    """Warm up all sides in turn until they are steady, and return the number of rounds.

    The sides are steady if three conditions are met: at least `least` rounds have run, nothing grew
    in the last round, and each side's median of the last three times is within 10 % of the median
    of the three times before. The warmup stops after `seconds` even if the sides are not steady.

    Args:
        calls: functions that make one call of a side and return its time.
        grew: a function that returns True if the last round added allocations or modules.
    """
    start, history = _agreed_time(), [list[float]() for _ in calls]
    rounds = 0
    while True:
        for side, call in zip(history, calls, strict=True):
            side.append(call())
        rounds += 1
        steady = not current_group().max(grew()) and all(_steady(side) for side in history)
        if rounds >= least and (steady or _agreed_time() - start > seconds):
            return rounds


def _agreed_time() -> float:
    return current_group().max(time.perf_counter())


def _steady(times: Sequence[float]) -> bool:
    if len(times) < 6:
        return False
    before, now = sorted(times[-6:-3])[1], sorted(times[-3:])[1]
    return abs(now - before) <= 0.10 * before


def warm(function: Callable[[], object]) -> int:
    """Call `function` until its time is steady and return the number of calls."""
    import torch

    from ..util.device_state import synchronizer

    wait = synchronizer("cuda" if torch.cuda.is_available() else "cpu")

    def call() -> float:
        start = time.perf_counter()
        function()
        wait()
        return time.perf_counter() - start

    return settle([call], lambda: False, least=3, seconds=2.0)


PLANTABLE = 0.85, 1.35
"""To plant a slowdown exactly, the number of calls may change by a factor in this range."""
LONG, FEW_SLOTS = 5e-3, 2
"""If a call is longer than `LONG` seconds, a round needs only `FEW_SLOTS` slots.

Two slots may stay in the L2, so the L2 is flushed before each window.
"""


def calls_a_round(seconds_per_call: float, slots: int) -> int:
    """Return the number of calls in a round: one per slot, or at most two if a call is long."""
    return min(slots, FEW_SLOTS) if seconds_per_call >= LONG else slots


def calls_for(seconds_per_call: float, window: float, slots: int) -> int:
    """Return the number of calls, in whole rounds, that takes closest to `window` seconds.

    So both sides' windows take about the same time, and the fixed cost of starting a window is
    about the same share of both windows.
    """
    calls = calls_a_round(seconds_per_call, slots)
    rounds = max(1, round(window / max(seconds_per_call * calls, 1e-9)))
    return min(rounds, 100_000) * calls


def extra_calls(counted: int, planted: float) -> int:
    """Return the number of extra calls that slow a window down by at least the share `planted`."""
    return math.ceil(counted * planted - 1e-9)


def calls_to_plant(calls: int, slots: int, planted: float) -> int:
    """Return a number near `calls`, chosen so that `planted` times this number is nearly whole.

    The number is a multiple of `slots`. For 1 %, one extra call in 100 is exact. 101 calls
    would need two extra calls, almost 2 %.
    """
    if not planted:
        return calls
    first = math.ceil(PLANTABLE[0] * calls / slots) * slots
    near = range(first, max(first, math.floor(PLANTABLE[1] * calls)) + 1, slots)
    return min(near, key=lambda n: (extra_calls(n, planted) / n, abs(n - calls)))
