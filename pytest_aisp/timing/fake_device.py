"""A simulated device that computes times with programmable noise, bias and faults.

Tests and docs use the simulated device instead of a GPU. The time of a window is the side's true
time, multiplied by shared and by separate noise, and rounded to the clock's resolution. Drift, the
warm-up ramp and the clock steps are the same for both sides. The noise of each session, process,
capture and window is separate for each side.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..isolation.interference import Cause
from .neighbors import NO_VERDICT, Neighbors, Slices
from .schedule import Budget, PairTimer, Samples, calls_to_plant, extra_calls, join, measure

if TYPE_CHECKING:
    from ..results.messages import Json

WINDOW = 1e-3
"""Shortest length of a window, in seconds."""
THROTTLING = 0.2
"""Logarithm of the factor by which a throttled block is slower."""
SLICE_SECONDS = 0.5e-3
"""Length of a time slice of the other process, in seconds."""
LAP_SECONDS = 0.024
"""Device time of one lap: six blocks, each with two 1 ms windows and two replays of a held side."""
DIP_WITHIN, DIP_SECONDS = 0.06, 0.01
"""A dip begins in the first 60 ms of device time and lasts for 5 to 15 ms."""


@dataclass(frozen=True)
class Noise:
    """The noise of a simulated device. Sizes are fractions: 0.01 is 1 %.

    Attributes:
        window: standard deviation of one window's time.
        heavy: True if the noise of windows has the heavy tail of Student's t(4).
        capture, process, session: standard deviation of one side's bias, which lasts for one
            capture, process or session.
        placement: standard deviation of a process's bias toward the side that is built first.
        drift: drift of both sides together, per second of device time.
        ramp: extra time at the start, which decays with `ramp_seconds`.
        step, step_chance: size of a clock step of both sides, and its chance per window.
        unlike: share of the common changes that does not affect the optimized side.
        rogue: chance that a process is off by 1 %.
        resolution: resolution of the clock, in seconds.
        throttle: chance that a block is throttled, which slows it by 20 %.
        steal: chance that the host takes the CPU during a block, which slows it by 20 %.
        neighbor: share of the device that another process uses, in time slices.
        dip: chance that a process has a dip. In a dip, both sides are 10 % slower for about 10 ms.
    """

    window: float = 0.003
    heavy: bool = False
    capture: float = 0.0012
    process: float = 0.0005
    session: float = 0.0
    placement: float = 0.0
    drift: float = 0.0
    ramp: float = 0.0
    ramp_seconds: float = 0.02
    step: float = 0.0
    step_chance: float = 0.0
    unlike: float = 0.0
    rogue: float = 0.0
    resolution: float = 0.0
    throttle: float = 0.0
    steal: float = 0.0
    neighbor: float = 0.0
    dip: float = 0.0


class Process:
    """One process on the simulated device. The biases stay the same until the process ends."""

    def __init__(
        self,
        seconds: tuple[float, float],
        noise: Noise,
        rng: random.Random,
        session: float = 0.0,
        planted: float = 0.0,
    ) -> None:
        self.seconds, self.noise, self.rng, self.planted = seconds, noise, rng, planted
        rogue = 0.01 if rng.random() < noise.rogue else 0.0
        # All bias is applied to the second side, because the verdict depends only on the ratio.
        self.bias = session + rogue + rng.gauss(0, noise.process)
        self.placement = rng.gauss(0, noise.placement) if noise.placement else 0.0
        self.now, self.clock_step = 0.0, 0.0
        begins = rng.uniform(0, DIP_WITHIN) if noise.dip and rng.random() < noise.dip else math.inf
        self.dip = begins, begins + rng.uniform(0.5, 1.5) * DIP_SECONDS

    def common(self) -> float:
        """Return the logarithm of the factor by which both sides are slower now."""
        noise = self.noise
        if noise.step_chance and self.rng.random() < noise.step_chance:
            self.clock_step = self.rng.gauss(0, noise.step)
        ramp = noise.ramp * math.exp(-self.now / noise.ramp_seconds) if noise.ramp else 0.0
        dip = 0.1 if self.dip[0] <= self.now < self.dip[1] else 0.0
        return noise.drift * self.now + ramp + self.clock_step + dip

    def white(self) -> float:
        """Return the logarithm of the noise factor of one window."""
        draw = self.rng.gauss(0, 1)
        if self.noise.heavy:  # t(4) has variance 2, so scale it to 1
            draw /= math.sqrt(self.rng.gammavariate(2, 2) / 4) * math.sqrt(2)
        return self.noise.window * draw

    def measure(self, budget: Budget) -> Samples:
        """Measure one pair. The laps share the blocks, and each lap has its own capture."""
        parts: list[Samples] = []
        share = budget.lap()
        neighbors = Neighbors(self.chain if self.noise.neighbor else None)
        neighbors.before()
        for lap in range(budget.laps):
            capture = self.placement * (-1) ** lap + self.rng.gauss(0, self.noise.capture)
            timer = _PairTimer(self, capture, budget.window or WINDOW)
            parts.append(measure(timer, share, self.rng, lap % 2))
            neighbors.after_lap(parts[-1].baseline, parts[-1].optimized)
            share = share.exactly(len(parts[0].blocks))
        neighbors.refuse(NO_VERDICT)
        parts[0].details.update(neighbors.details())
        return join(parts)

    def chain(self) -> Slices:
        """Return the other process's time slices during a chain of kernels that takes 4 ms."""
        lost = self.lost(4e-3)
        return Slices(lost, SLICE_SECONDS if lost else 0.0, 4e-3 + lost)

    def lost(self, seconds: float) -> float:
        """Return the time lost to the other process during `seconds` of computing."""
        share = self.noise.neighbor
        slices = seconds * share / (1 - share) / SLICE_SECONDS
        return SLICE_SECONDS * (math.floor(slices) + (self.rng.random() < slices % 1))


class _Window:
    repeats = 2

    def __init__(self, timer: _PairTimer, side: int, counted: int, extra: int) -> None:
        self.timer, self.side, self.counted, self.calls = timer, side, counted, counted + extra

    def __call__(self) -> float:
        process, noise = self.timer.process, self.timer.process.noise
        own = (process.bias + self.timer.capture) if self.side else 0.0
        shared = 1.0 - noise.unlike if self.side else 1.0
        throttling = THROTTLING if self.timer.cause else 0.0
        scale = math.exp(own + shared * process.common() + process.white() + throttling)
        seconds = process.seconds[self.side] * self.calls * scale
        if noise.neighbor:
            seconds += process.lost(seconds)
        process.now += self.repeats * seconds  # the untimed replay takes the same time
        if noise.resolution:
            phase = process.rng.random()
            seconds = math.floor(seconds / noise.resolution + phase) * noise.resolution
        return max(seconds, 1e-12) / self.counted


class _PairTimer:
    """A pair of windows in a simulated process, on the ``graph`` clock."""

    clock = "graph"

    def __init__(self, process: Process, capture: float, window: float) -> None:
        self.process, self.capture = process, capture
        counts = [max(1, math.ceil(window / s)) for s in process.seconds]
        counts = [calls_to_plant(count, 1, process.planted) for count in counts]
        extra = extra_calls(counts[1], process.planted)
        self.windows = (_Window(self, 0, counts[0], 0), _Window(self, 1, counts[1], extra))
        self.cause = self._draw_cause()

    def _draw_cause(self) -> Cause | None:
        """Return the cause that disturbs the next block, or None."""
        noise, rng = self.process.noise, self.process.rng
        if noise.throttle and rng.random() < noise.throttle:
            return Cause("thermal slowdown (simulated)")
        if noise.steal and rng.random() < noise.steal:
            return Cause("the host took 20% of the CPU time (steal) (simulated)")
        return None

    def refresh(self, *, last: bool) -> None:
        """Do nothing, because a simulated pair has no values to rewrite."""

    def disturbance(self) -> Cause | None:
        cause, self.cause = self.cause, self._draw_cause()
        return cause

    def details(self) -> dict[str, object]:
        counted = [w.counted for w in self.windows]
        return {"calls": [w.calls for w in self.windows], "counted": counted, "slots": 1}


def hold(name: str, options: Mapping[str, Json], seed: str, *, other: bool, lap: int) -> PairTimer:
    """Return the timer of two copies of one side in a simulated process, for a `HoldTask`.

    Args:
        options: as for `simulate`. ``name@other`` is the side in the other environment.
        seed: the seed of this process, unlike the seeds of all others.
    """
    seconds = options["seconds"]
    time = float(seconds.get(f"{name}@other", seconds[name]) if other else seconds[name])
    seed, noise = f"{options.get('seed', 0)}{seed}", Noise(**options.get("noise", {}))
    device = Process((time, time), noise, random.Random(seed))
    process = Process((time, time), noise, random.Random(seed := f"{seed}{other}"))
    process.dip = device.dip  # it is the same for both processes
    process.rng, process.now = random.Random(f"{seed}{lap}"), lap * LAP_SECONDS
    timer = _PairTimer(process, process.rng.gauss(0, process.noise.capture), WINDOW)
    timer.windows = timer.windows[1], timer.windows[1]
    return timer


def simulate(
    baseline: str, optimized: str, options: Mapping[str, Json], budget: Budget, seed: str
) -> Samples:
    """Measure one case in one simulated process. A `TimeTask` can name this as its timer.

    Args:
        options: ``seconds`` are the true times by side name (``name@old`` is the side at an older
            commit). ``noise`` has the keywords of `Noise`, ``session`` is the session's bias,
            ``planted`` is the second side's slowdown, and ``details`` are added to the result.
        seed: the seed of this process, unlike the seeds of all others.
    """
    seconds = options["seconds"]
    rng = random.Random(f"{options.get('seed', 0)}{seed}")
    now = optimized if baseline.endswith("@old") else baseline
    times = float(seconds.get(baseline, seconds[now])), float(seconds[optimized])
    noise, session = Noise(**options.get("noise", {})), options.get("session", 0.0)
    process = Process(times, noise, rng, session, options.get("planted", 0.0))
    samples = process.measure(budget)
    samples.details.update(options.get("details", {}))
    return samples
