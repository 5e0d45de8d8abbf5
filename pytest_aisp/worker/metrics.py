"""Measure metrics other than time: memory, launches, energy, or goodput of each side's calls.

The sides are measured separately, one after the other. A process side runs in a fresh process.
`results.metric_limits` compares the results with their limits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from ..checking.inputs import InputPool
from ..page.pair import ROLES, PageError, Side
from ..results.messages import CountTask
from ..timing.cross_check import compute_seconds, launches_per_call
from ..timing.memory import allocated, fragmentation, reserved
from ..timing.schedule import Window
from ..timing.trial import Trial
from ..util.device_state import Telemetry
from ..util.process_group import current_group
from .client import Progress
from .process_timer import ProcessSide, ask_fresh

WINDOW_SECONDS = 5.0
"""Minimum length of a window that measures energy."""
RAMP_SECONDS = 1.5
"""Seconds of the same work before each window. Power and clocks settle within a second."""
WINDOW_ORDER = (0, 1, 1, 0)
"""The order of the windows. With this order, a GPU that warms up affects both sides equally."""
COUNTERS: dict[str, Callable[[InputPool, Side], float]] = {
    "memory": allocated,
    "reserved": reserved,
    "fragmentation": fragmentation,
    "launches": launches_per_call,
    "goodput": compute_seconds,
}
"""Functions that measure one side, keyed by metric. Goodput's function measures compute time."""


class Uncountable(PageError):
    """The metric cannot be measured for this side or on this GPU. The message says why."""


def count(task: CountTask, trial: Trial) -> dict[str, float]:
    """Return the amount of `task.metric` per call, keyed by role.

    Raises:
        Uncountable: if the metric cannot be measured for these sides.
    """
    sides = [side for side, _ in trial.sides]
    processes = [side for side in sides if isinstance(side, ProcessSide)]
    if task.metric == "energy":
        if processes:
            raise Uncountable(
                "assert_energy needs 5 s of work; the processes of a process side end before that"
            )
        return energy(trial)
    counter = COUNTERS[task.metric]
    if task.side:  # this is the fresh process of a process side
        return {task.side: counter(trial.pool, sides[ROLES.index(task.side)])}
    if processes:
        tasks = [replace(task, side=role) for role in ROLES]
        baseline, optimized = ask_fresh(list(zip(tasks, processes, strict=True)), trial.progress)
        return {**baseline, **optimized}
    return {role: counter(trial.pool, side) for role, side in zip(ROLES, sides, strict=True)}


def energy(trial: Trial) -> dict[str, float]:
    """Return the joules per call of all ranks together, keyed by role, and their ``noise``.

    Each side has two windows. The noise of a side is half the relative difference between the two
    windows. The larger of both sides' noises is returned.

    Raises:
        Uncountable: if NVML cannot measure energy on this GPU.
    """
    with trial.ready() as timer:
        read = energy_counter()
        joules: tuple[list[float], list[float]] = ([], [])
        for number, side in enumerate(WINDOW_ORDER, start=1):
            trial.progress(f"energy of {ROLES[side]}, window {number} of {len(WINDOW_ORDER)}")
            joules[side].append(_joules_per_call(timer.windows[side], read, trial.progress))
    means = {role: sum(both) / len(both) for role, both in zip(ROLES, joules, strict=True)}
    return {**means, "noise": max(abs(a - b) / (a + b) for a, b in joules)}


def energy_counter() -> Callable[[], float]:
    """Return a function that reads the joules that this process's GPU has consumed.

    Raises:
        Uncountable: if NVML cannot measure energy on this GPU.
    """
    import torch

    read = Telemetry(torch.cuda.current_device()).energy
    if read() is None:
        raise Uncountable("assert_energy: NVML does not report energy on this GPU")
    return lambda: read() or 0.0


def _joules_per_call(window: Window, read: Callable[[], float], progress: Progress) -> float:
    window()
    start = time.perf_counter()
    window()
    seconds = max(current_group().max(time.perf_counter() - start), 1e-6)
    steps = CounterSteps(lambda: current_group().sum(read()))
    ramp, rest = (math.ceil(length / seconds) for length in (RAMP_SECONDS, WINDOW_SECONDS))
    every = max(1, (ramp + rest) // 10)
    for turn in range(ramp + rest):
        window()
        steps.add(window.calls * window.repeats, ramp=turn < ramp)
        if turn % every == 0:
            progress("energy")  # renews the time limit
    return steps.joules_per_call


@dataclass
class CounterSteps:
    """The steps of the energy counter, which changes its value about every 0.1 s.

    Attributes:
        steps: total joules and total calls at each moment when the counter had a new value.
    """

    read: Callable[[], float]
    calls: float = 0.0
    value: float | None = None
    steps: list[tuple[float, float]] = field(default_factory=list)

    def add(self, calls: float, *, ramp: bool) -> None:
        """Read the counter after `calls` more calls. Steps during the ramp are ignored."""
        self.calls += calls
        before, self.value = self.value, self.read()
        if not ramp and before is not None and self.value != before:
            self.steps.append((self.value, self.calls))

    @property
    def joules_per_call(self) -> float:
        """Joules per call between the first and the last step."""
        if len(self.steps) < 2:
            raise Uncountable("assert_energy: the GPU's energy counter does not count")
        (first_value, first_calls), (last_value, last_calls) = self.steps[0], self.steps[-1]
        return (last_value - first_value) / (last_calls - first_calls)
