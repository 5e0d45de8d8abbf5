"""Count a metric of a case, such as memory: once, and in fresh processes if that decides something.

The amount that an allocator takes depends on the state of the machine. So an amount that would be
red is counted again in fresh processes, and a recording counts in each of its processes. What is
judged and stored is the median, with the half of the range as noise. Launches are exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..results import metric_limits
from ..results.messages import CountTask
from ..results.metric_limits import Amounts, Name, pooled
from ..results.task_results import Amounts as Counted
from .run_context import Unrecorded

if TYPE_CHECKING:
    from ..worker.client import Worker
    from .case import CaseRun

REPEATS = 2
"""How many more processes count an amount that would be red."""


def count(case: CaseRun, metric: Name, worker: Worker | None = None) -> Amounts:
    """Return the amounts per call of both sides, counted in one process."""
    client, run = case.client, case.run
    task = client.task(CountTask, metric=metric, timer=run.timer)
    amounts = run.when_quiet(lambda: client.ask(task, Counted, worker), lambda: None)
    case.checks.append(amounts)
    if metric == "goodput" and case.timing is not None:
        return metric_limits.shares(amounts, case.timing.pair_seconds)
    return amounts


def count_again(case: CaseRun, metric: Name, first: Amounts, processes: int) -> Amounts:
    """Return `first` pooled with the amounts that `processes` more processes count."""
    run, found = case.run, [first]
    for number in range(processes):
        run.progress(f"count {metric} again, {number + 1}/{processes}")
        worker = run.replay or case.client.fresh_worker()
        try:
            found.append(count(case, metric, worker))
        except Unrecorded:  # the recorded run did not count again
            break
        finally:
            if run.replay is None:
                worker.close()
    if len(found) > 1:
        case.notes.append(f"{metric} was counted in {len(found)} processes")
    return pooled(found)
