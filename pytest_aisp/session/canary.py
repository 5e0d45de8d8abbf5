"""The canary: each run times one side against itself, once unchanged and once slowed down.

The first must show no difference and the second must become a suspect. Otherwise no verdict of the
run counts. docs/explanation/verdict.md has the chance that either goes wrong by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import pytest

from ..results import verdict
from ..results.results_json import Canary
from ..results.row import ratio
from ..results.verdict import Reading
from .options import RECORDER, RUN
from .run_context import Failed, RunContext

if TYPE_CHECKING:
    from .case import CaseRun

ATTEMPTS = 4
"""Processes in which the planted slowdown may be seen."""
CLOCKS = ("graph", "queue", "host", "cpu")
"""Clocks on which a slowdown can be planted, the most precise first."""

TimeItself = Callable[[float, bool], tuple[Reading, float]]
"""Times a side against itself. Takes the slowdown to plant and whether to use a fresh process;
returns the reading and the slowdown that was planted, which is a whole number of calls."""


def offer_to_canary(case: CaseRun) -> None:
    """Keep `case` for this process's canary if its clock is the most precise so far."""
    if case.timing is not None and case.timing.clock in CLOCKS:
        best = case.run.canary_case
        if best is None or _coarseness(case) < _coarseness(best):
            case.run.canary_case = case


def _coarseness(case: CaseRun) -> tuple[int, float]:
    # A short call fills a window many times, so that one in a hundred can be planted.
    assert case.timing is not None
    return CLOCKS.index(case.timing.clock), case.timing.pair_seconds[1]


def has_canary(run: RunContext) -> bool:
    """Return whether this run needs canaries."""
    return not (run.settings.aa or run.settings.in_process or run.replay)


def run_at_end(session: pytest.Session) -> None:
    """Run this process's canary, and give it to the controller."""
    config = session.config
    run = config.stash[RUN]
    if run.canary_case is None or not has_canary(run):
        return
    run.cases_done = True  # the suite's time limit does not apply here: verdicts need their canary
    try:
        with run.machine_locks(run.canary_case.case):
            canary = run_canary(run.canary_case)
    except KeyboardInterrupt:  # pytest catches no interrupt here and would leave no results
        session.exitstatus = pytest.ExitCode.INTERRUPTED
        interrupt = pytest.ExceptionInfo.from_current()
        config.hook.pytest_keyboard_interrupt(excinfo=interrupt)
        return
    recorder = config.stash.get(RECORDER, None)
    if recorder is not None:
        recorder.add_canary(canary)
    else:
        config.workeroutput["aisp_canary"] = msgspec.to_builtins(canary)  # type: ignore[attr-defined]


def run_canary(case: CaseRun) -> Canary:
    """Time the optimized side of `case`, which this process has measured, against itself."""
    assert case.timing is not None
    client, numbers = case.client, iter(range(100))
    canary = Canary(case.location.nodeid.rpartition("::")[2], case.timing.clock)

    def time_itself(planted: float, fresh: bool) -> tuple[Reading, float]:
        if not fresh:
            return client.time_itself(planted, next(numbers))
        worker = client.fresh_worker()
        try:
            return client.time_itself(planted, next(numbers), worker)
        finally:
            worker.close()

    try:
        judge(canary, case.timing.spread, time_itself)
    except Failed as failure:
        canary.wrong = f"cannot be timed again: {str(failure).splitlines()[0]}"
    return canary


def judge(canary: Canary, spread: float, time_itself: TimeItself) -> None:
    """Fill in `canary` with the timings of a side whose processes scatter by `spread`."""
    first, _ = time_itself(0.0, False)
    spread = verdict.effective_spread(spread, first)
    gates = verdict.same_gates(spread)
    decision = verdict.decide(first, gates, lambda: time_itself(0.0, True)[0])
    canary.same, canary.votes = first.value, [vote.value for vote in decision.votes]
    if "red" in decision.outcomes.values():
        canary.wrong = f"a side differs from its copy: {', '.join(map(ratio, canary.votes))}"
        return
    for attempt in range(ATTEMPTS):
        slowed, canary.planted = time_itself(verdict.planted_share(spread), attempt > 0)
        canary.seen.append(slowed.value)
        if verdict.sees(slowed, spread):
            return
    seen = ", ".join(map(ratio, canary.seen))
    canary.wrong = f"a planted slowdown of {canary.planted:.1%} is not seen: {seen}"
