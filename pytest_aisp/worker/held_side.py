"""A side that is kept ready and timed window by window while another process waits.

The pytest process requests windows in turn from this process and from a process in another
environment. Only one of the two processes works at any moment.
"""

from __future__ import annotations

import pkgutil
import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from msgspec import Struct

from ..isolation import monkeypatches
from ..page.pair import PageError, Pair
from ..results.messages import (
    CaseTask,
    HoldTask,
    Json,
    ReleaseTask,
    TimeTask,
    WindowTask,
    case_fields,
)
from ..results.task_results import HoldResult, WindowResult
from ..timing.neighbors import Neighbors
from ..timing.schedule import Budget, PairTimer
from . import input_process
from .client import Progress
from .loader import Cache, TaskContext

Held = HoldTask | WindowTask | ReleaseTask
Quiet = Callable[[CaseTask, Pair], AbstractContextManager[None]]
"""A function that returns the context in which a process is quiet enough to time something."""


@dataclass
class HeldSide:
    """Two copies of one side, ready to be timed.

    Attributes:
        laps: the number of laps in which the side is timed.
    """

    timer: PairTimer
    laps: int
    _verify: Callable[[], None]
    _opened: ExitStack

    def result(self) -> HoldResult:
        """Return the facts about the windows that the schedule uses: clock, calls, laps."""
        windows = self.timer.windows
        counted, repeats = [window.counted for window in windows], windows[0].repeats
        return HoldResult(self.timer.clock, self.laps, counted, repeats)

    def window(self, task: WindowTask) -> WindowResult:
        """Time one window. Ignore disturbances that happened while the other process worked."""
        if task.refresh:
            self.timer.refresh(last=task.refresh == "last")
        self.timer.disturbance()
        seconds = self.timer.windows[task.copy]()
        cause = self.timer.disturbance()
        return WindowResult(seconds) if cause is None else WindowResult(seconds, *cause)

    def release(self) -> Mapping[str, Json]:
        """Compare the outputs of the last calls with the reference, and release the side."""
        with self._opened:
            self._verify()
            return self.timer.details()


@dataclass
class Holder:
    """Answers the tasks about a held side. A process holds at most one side.

    Attributes:
        busy: True until the last lap of a side is over. The process must not be replaced.
    """

    cache: Cache
    quiet: Quiet
    progress: Progress
    busy: bool = False
    _held: HeldSide | None = None

    def answer(self, task: Held) -> Struct | Mapping[str, Json]:
        """Return the result of `task`."""
        if isinstance(task, HoldTask):
            self.busy = True
            self._held = hold(task, self.cache, self.quiet, self.progress)
            return self._held.result()
        if self._held is None:
            raise PageError(f"no side is held that could answer {task.kind!r}")
        if isinstance(task, WindowTask):
            return self._held.window(task)
        held, self._held, self.busy = self._held, None, not task.last
        details = held.release()
        if task.last:
            self.cache.release_memory(task.device)
        return details


def hold(task: HoldTask, cache: Cache, quiet: Quiet, progress: Progress) -> HeldSide:
    """Build two copies of a side.

    Raises:
        PageError: if the side cannot be timed in two environments.
    """
    context = TaskContext(task)
    declared = side, _ = context.side(task.side)
    seed, budget = f"{side.__name__}{task.size}{task.replicate}", Budget(**task.budget)
    if task.timer is not None:
        module = task.timer["target"].partition(":")[0]
        simulate = pkgutil.resolve_name(f"{module}:hold")
        timer = simulate(side.__name__, task.timer["options"], seed, other=task.other, lap=task.lap)
        return HeldSide(timer, budget.laps, lambda: None, ExitStack())
    from ..timing.trial import Trial

    timed = TimeTask(**case_fields(task), versus="self", replicate=task.replicate)
    with ExitStack() as stack:  # closes everything that was opened if anything fails
        stack.enter_context(quiet(task, context.pair))
        monkeypatches.refuse_tracers()
        source = stack.enter_context(input_process.values_for(timed))
        reference = cache.reference(task, context.pair, task.size)
        rng = random.Random(seed)
        trial = Trial(timed, reference, (declared, declared), budget, rng, progress, source)
        trial.planted = task.planted, task.planted
        trial.neighbors = Neighbors(trial.neighbors.read)  # NVML would report the other process
        if trial.on_gpu and task.lap == 0:  # chooses the clock, and warms up
            with trial.ready():
                pass
            assert trial.known is not None
            if task.known is not None and task.known[0] != trial.known[0]:
                raise PageError(
                    f"{side.__name__} is timed on the {trial.known[0]} clock in one environment,"
                    f" and on the {task.known[0]} clock in the other one"
                )
        trial.known = task.known or trial.known
        timer = stack.enter_context(trial.ready())

        def verify() -> None:
            if timer.unseen is None:
                trial.verifier.verify_windows(timer)
            else:
                trial.verifier.verify_calls(timer, timer.unseen)

        opened = stack.pop_all()
    return HeldSide(timer, trial.laps, verify, opened)
