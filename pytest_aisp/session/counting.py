"""Count a metric of a case, such as memory, and judge the amounts.

Allocators take different amounts of memory in different processes. So an amount that would be red
is counted again in fresh processes, and the majority decides. A run that records results counts in
each of its processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..results.messages import CountTask
from ..results.metric_limits import METRICS, Amounts, Metric, Name, pooled, shares
from ..results.models import Result
from ..results.task_results import Amounts as Counted
from ..results.verdict import VOTES, Finding
from ..worker.client import ReplayWorker
from .cause import cause_of, evidence
from .run_context import RunContext, Unrecorded
from .stored_result import Differences

if TYPE_CHECKING:
    from ..worker.client import Worker
    from .case import CaseRun


@dataclass
class MetricJudgement:
    """The amount of a metric per call of each side.

    Attributes:
        limit: the page's limit.
        stored: the optimized side's stored amount.
        remark: a message with both amounts; empty in an A/A trial.
    """

    amounts: Amounts
    limit: float
    stored: float | None = None
    remark: str = ""
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_suspect(self) -> bool:
        """Whether the amount misses the page's limit, or is worse than the stored amount."""
        return any(finding.verdict not in ("new", "pass") for finding in self.findings)


def count_and_judge(case: CaseRun, name: Name, limit: float) -> MetricJudgement:
    """Count a metric. If the run records, or the amount is red, count in other processes too."""
    settings, counted = case.run.settings, [_count(case, name)]
    judged = _judge(case, name, limit, counted)
    if settings.in_process:
        return judged
    if judged.is_suspect:
        # Only the votes decide. The first amount is biased, because only extreme amounts lead to
        # votes.
        known = len(case.client.missing_votes)
        votes = _votes(case, name, lambda vote: _judge(case, name, limit, [vote]))
        judged = _judge(case, name, limit, votes) if votes else judged
        missing = case.client.missing_votes[known:]
        if missing and not judged.is_suspect:
            judged.findings.append(Finding("inconclusive", tuple(missing)))
        counted += votes
    if settings.update is not None and not judged.is_suspect:
        numbers = range(len(counted), settings.processes)
        others = [_count_again(case, name, number) for number in numbers]
        counted += [amounts for amounts in others if amounts is not None]
        judged = _judge(case, name, limit, counted)
    return judged


def replays(run: RunContext, name: str) -> bool:
    """Return whether this run replays a recorded run that counted this metric."""
    rows = run.replay.rows.values() if isinstance(run.replay, ReplayWorker) else ()
    return any(name in row.goals for row in rows)


def _count(case: CaseRun, name: Name, worker: Worker | None = None) -> Amounts:
    """Return the amounts per call of both sides, counted in one process."""
    client, run = case.client, case.run
    task = client.task(CountTask, metric=name, timer=run.timer)
    amounts = run.when_quiet(lambda: client.ask(task, Counted, worker), lambda: None)
    case.checks.append(amounts)
    if name == "goodput" and case.timing is not None:
        return shares(amounts, case.timing.pair_seconds)
    return amounts


def _count_again(case: CaseRun, name: Name, number: int, *, vote: bool = False) -> Amounts | None:
    """Return the amounts in process `number`; None if a replayed run did not count again.

    A vote uses a fresh process. When recording, half of the processes are fresh. In the other half,
    the allocator has been used before.
    """
    case.run.progress(f"count {name} again, {number}")
    fresh = case.run.replay is None and (vote or number % 2 == 0)
    worker = case.client.fresh_worker() if fresh else case.run.replay or case.client.worker(number)
    try:
        amounts = _count(case, name, worker)
    except Unrecorded as failure:
        if vote:
            case.client.missing_votes.append(str(failure).splitlines()[0])
        return None
    finally:
        if fresh:
            worker.close()
    both = METRICS[name].both(amounts)
    case.notes.append(f"{name} in {'fresh ' * fresh}process {number}: {both}")
    return amounts


def _votes(case: CaseRun, name: Name, judge: Callable[[Amounts], MetricJudgement]) -> list[Amounts]:
    """Return the amounts counted in fresh processes, one by one until `VOTES` of them agree."""
    found: list[Amounts] = []
    reds = 0
    while VOTES not in (reds, len(found) - reds):
        vote = _count_again(case, name, len(found) + 1, vote=True)
        if vote is None:
            break
        found.append(vote)
        reds += judge(vote).is_suspect
    return found


def _judge(case: CaseRun, name: Name, limit: float, counted: Sequence[Amounts]) -> MetricJudgement:
    """Compare the median amounts with the page's limit and with the stored amount."""
    stored, settings, metric = case.stored, case.run.settings, METRICS[name]
    amounts = pooled(counted)
    if settings.aa:
        return MetricJudgement(amounts, limit)
    text = f"{name}: {metric.describe(amounts, limit)}"
    mine = stored.result
    before = mine.goals.get(name) if mine is not None else None
    judged = MetricJudgement(amounts, limit, before["optimized"] if before else None, text)
    votes = _listed(metric, counted)
    if _most(lambda each: metric.missed(each, limit), counted):
        reason = f"{text} ({metric.assertion} on the page){votes} -> red"
        found = Differences() if mine is None else _differences(case, mine)
        lines = evidence(case.client, stored, found)
        cause = cause_of(case.client, stored, found, case.sources())
        judged.findings.append(Finding("fail", (reason, *lines), cause, missed_limit=True))
        return judged
    if mine is None or before is None or settings.update == "all":
        judged.findings.append(Finding("new" if before is None else "pass"))
        return judged
    if not _most(lambda each: metric.worse(before, each, mine.sessions), counted):
        judged.findings.append(Finding("pass"))
        return judged
    found = _differences(case, mine)
    now, then = metric.unit(amounts["optimized"]), metric.unit(before["optimized"])
    margin = f"{metric.allowed(before, mine.sessions):.0%}"
    margin += f" + {metric.unit(metric.slack)}" * bool(metric.slack)
    origin = f"(stored in {stored.relative()}), margin {margin}"
    reason = f"{name}: {now} against {then} {origin}{votes} -> red"
    word = "stale" if found.lines() else "regressed"
    lines = evidence(case.client, stored, found)
    cause = cause_of(case.client, stored, found, case.sources())
    judged.findings.append(Finding(word, (reason, *lines), cause))
    return judged


def _differences(case: CaseRun, mine: Result) -> Differences:
    """Return the differences from the stored result, in any time of this run."""
    found = case.judgement.differences if case.judgement is not None else Differences()
    if found.lines():
        return found
    return case.stored.differences(mine, case.environment(), case.sources(), mine.clock or "")


def _most(is_red: Callable[[Amounts], bool], counted: Sequence[Amounts]) -> bool:
    return 2 * sum(map(is_red, counted)) > len(counted)


def _listed(metric: Metric, counted: Sequence[Amounts]) -> str:
    """Return the amounts of several processes as text, or an empty string for one process."""
    amounts = ", ".join(metric.unit(each["optimized"]) for each in counted)
    return f"; in {len(counted)} processes {amounts}" if len(counted) > 1 else ""
