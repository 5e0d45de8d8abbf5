"""The canary: each process times one side against itself, once unchanged and once slowed down.

The unchanged side must show no difference, and the slowdown must be detected. If either trial
fails, all verdicts of the run are invalid. docs/explanation/verdict.md has the probabilities of a
failure by chance.
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
"""The number of attempts, each in its own process, to detect the slowdown. One success is enough.
"""
CLOCKS = ("graph", "queue", "host", "cpu")
"""The clocks on which a slowdown can be simulated, with the most precise clock first."""

TimeItself = Callable[[float, bool], tuple[Reading, float]]
"""A function that times a side against itself. The arguments are the requested slowdown, and True
to use a fresh process. The results are the reading and the actual slowdown. The actual slowdown can
differ from the requested one, because it consists of whole calls.
"""


def offer_to_canary(case: CaseRun) -> None:
    """Keep `case` for this process's canary if its clock is the most precise so far."""
    if case.timing is not None and case.timing.clock in CLOCKS:
        best = case.run.canary_case
        if best is None or _coarseness(case) < _coarseness(best):
            case.run.canary_case = case


def _coarseness(case: CaseRun) -> tuple[int, float]:
    # A window of short calls has so many calls that even 1 % of them is at least one whole call.
    assert case.timing is not None
    return CLOCKS.index(case.timing.clock), case.timing.pair_seconds[1]


def has_canary(run: RunContext) -> bool:
    """Return whether this run needs canaries."""
    return not (run.settings.aa or run.settings.in_process or run.replay)


def run_at_end(session: pytest.Session) -> None:
    """Run this process's canary, and send its result to the controller."""
    config = session.config
    run = config.stash[RUN]
    if run.canary_case is None or not has_canary(run):
        return
    run.cases_done = True  # from here on there is no time limit: verdicts need the canary
    try:
        with run.machine_locks(run.canary_case.case):
            canary = run_canary(run.canary_case)
    except KeyboardInterrupt:  # uncaught here, it would lose the results
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

    spread, neighbors = case.timing.spread, len(client.neighbors)

    def forget() -> None:
        canary.same, canary.votes, canary.seen = None, [], []

    try:
        case.run.when_quiet(lambda: judge(canary, spread, time_itself), forget)
    except Failed as failure:
        canary.wrong = f"cannot be timed again: {str(failure).splitlines()[0]}"
    if canary.wrong and len(client.neighbors) > neighbors:
        canary.wrong += f"; {client.neighbor()}"
    return canary


def judge(canary: Canary, spread: float, time_itself: TimeItself) -> None:
    """Fill in the fields of `canary`. `spread` is the standard deviation between processes."""
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
    canary.wrong = f"a planted slowdown of {canary.planted:.1%} was not detected: {seen}"
