"""Goals beyond time, counted: what a call of each side takes of one of them.

Both sides of a pair are counted one after the other, each alone; a process side in a fresh process
of its own. What of a goal is good enough, `results.goals` says.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..checking.inputs import InputPool
from ..page.pair import ROLES, PageError, Side
from ..results.messages import CountTask
from ..timing.cross_check import compute_seconds, launches_per_call
from ..timing.memory import allocated, fragmentation, reserved
from ..timing.trial import Trial
from ..util.device_state import Telemetry
from ..util.process_group import current_group
from .process_timer import ProcessSide, ask_fresh

if TYPE_CHECKING:
    from ..timing.schedule import Window


def count(task: CountTask, trial: Trial) -> dict[str, float]:
    """Return by role what a call takes of `task.metric`.

    Raises:
        Uncountable: for a goal that such a side has no figure of.
    """
    sides = [side for side, _ in trial.sides]
    if task.metric == "energy":
        if any(hasattr(side, "environment") for side in sides):
            raise Uncountable("assert_energy: a process side's processes end before 5 s of work do")
        return joules(trial)
    counter = COUNTERS[task.metric]
    if task.side:  # in the process of a process side
        return {task.side: counter(trial.pool, sides[ROLES.index(task.side)])}
    processes = [side for side in sides if isinstance(side, ProcessSide)]
    if processes:
        tasks = [replace(task, side=role) for role in ROLES]
        baseline, optimized = ask_fresh(list(zip(tasks, processes, strict=True)), trial.progress)
        return {**baseline, **optimized}
    return {r: counter(trial.pool, s) for r, s in zip(ROLES, sides, strict=True)}


SECONDS = 5.0
"""Least length of a window."""
RAMP = 1.5
"""Seconds of the same work before it: power follows load within one, the clock with it."""
ORDER = (0, 1, 1, 0)
"""The sides' windows: a GPU that warms up is on both accounts."""


class Uncountable(PageError):
    """A goal of which such a side or such a GPU has no figure; the message says why."""


@dataclass
class Steps:
    """The counter's steps while calls run: (joules, calls) where it was seen to have stepped."""

    read: Callable[[], float]
    calls: float = 0.0
    last: float = math.nan
    first: tuple[float, float] | None = None
    latest: tuple[float, float] | None = None

    def look(self, calls: float, *, ramp: bool) -> None:
        """Note a step, if there was one, after `calls` more calls."""
        self.calls += calls
        now, before = self.read(), self.last
        self.last = now
        if ramp or math.isnan(before) or now == before:
            return
        self.latest = now, self.calls
        self.first = self.first or self.latest

    @property
    def joules(self) -> float:
        """Joules of a call. Raises Uncountable where the counter has not stepped twice."""
        if self.first is None or self.latest is None or self.latest == self.first:
            raise Uncountable("assert_energy: the GPU's energy counter does not count")
        joules = self.latest[0] - self.first[0]
        return joules / (self.latest[1] - self.first[1])


def joules(trial: Trial) -> dict[str, float]:
    """Return by role the joules that a call takes, of all ranks together, and their ``noise``.

    The noise is the larger of both sides' differences between their windows, as a share, halved.

    Raises:
        Uncountable: where NVML counts none.
    """
    with trial.ready() as bout:
        read = counter()
        found: dict[int, list[float]] = {0: [], 1: []}
        for number, side in enumerate(ORDER):
            trial.progress(f"energy of {ROLES[side]}, window {number + 1} of {len(ORDER)}")
            found[side].append(_window(bout.windows[side], read, trial.progress))
    means = {role: sum(found[side]) / len(found[side]) for side, role in enumerate(ROLES)}
    noise = max(abs(a - b) / (a + b) for a, b in found.values())
    return {**means, "noise": noise}


def counter() -> Callable[[], float]:
    """Return what reads the joules that this process's GPU has taken.

    Raises:
        Uncountable: where NVML does not say.
    """
    import torch

    read = Telemetry(torch.cuda.current_device()).energy
    if read() is None:
        raise Uncountable("assert_energy: NVML counts no energy on this GPU")
    return lambda: read() or 0.0


def _window(
    window: Window, read: Callable[[], float], tell: Callable[[str], Any] = lambda text: None
) -> float:
    """Return the joules of a call, from so many calls that they last `SECONDS`."""
    window()
    start = time.perf_counter()
    window()
    lasts = max(current_group().max(time.perf_counter() - start), 1e-6)
    steps = Steps(lambda: current_group().sum(read()))
    ramp, rest = (math.ceil(seconds / lasts) for seconds in (RAMP, SECONDS))
    every = max(1, (ramp + rest) // 10)
    for turn in range(ramp + rest):
        window()
        steps.look(window.calls * window.repeats, ramp=turn < ramp)
        if turn % every == 0:
            tell("energy")  # a window is long: it renews the time limit
    return steps.joules


COUNTERS: dict[str, Callable[[InputPool, Side], float]] = {
    "memory": allocated,
    "reserved": reserved,
    "fragmentation": fragmentation,
    "launches": launches_per_call,
    "goodput": compute_seconds,
}
"""By goal, what counts one side alone; of goodput, the seconds at compute."""
