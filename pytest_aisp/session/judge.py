"""Judge a case: hold its speedup, its changed sides and its metrics against their limits.

Each function returns findings; none decides alone, and none touches the row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ..kernels import autotune
from ..results import models, verdict
from ..results.metric_limits import METRICS
from ..results.row import bare, ratio
from ..results.verdict import Finding, Gate
from .case_client import CaseClient, reading, remeasuring
from .run_context import Failed
from .stored_result import StoredResult

if TYPE_CHECKING:
    from .measurement import Timing


@dataclass
class Judgement:
    """What the gates say of a speedup; every number is ln(speedup).

    Attributes:
        votes: of the fresh processes.
        suspect: -1 or 1 where the first value is past a gate's screen: direction of the change.
        session: spread from session to session.
        detectable: the smallest loss found in 99 % of trials; None where nothing is judged.
        stored: the stored value that it was held against, and `stored_in` its file.
        differences: why a loss against the stored result need not be the code's fault.
    """

    votes: list[float]
    suspect: int
    session: float
    detectable: float | None
    stored: float | None
    stored_in: str
    differences: list[str]
    findings: list[Finding]


@dataclass
class MetricJudgement:
    """What a call of each side takes of a metric.

    Attributes:
        found: by role, and its relative ``noise`` where there is any.
        limit: the page's limit; stored: the optimized side's stored amount.
        remark: both amounts in words; empty in an A/A trial.
    """

    found: Mapping[str, float]
    limit: float
    stored: float | None = None
    remark: str = ""
    findings: list[Finding] = field(default_factory=list)


def judge_speedup(
    client: CaseClient,
    stored: StoredResult,
    timing: Timing,
    claim: float | str | None,
    claim_origin: str,
) -> Judgement:
    """Screen the first value, vote where it is suspect, and judge claim and stored result."""
    settings, clock, spread = client.run.settings, timing.clock, timing.spread
    session, mine = stored.session_spread(clock), stored.result
    findings: list[Finding] = []
    differences: list[str] = []
    has_record, same_environment = settings.aa, True
    held: float | None = None
    gates = list(verdict.same_gates(spread)) if settings.aa else _claim_gates(claim, timing)
    if not settings.aa and mine is not None and mine.value is not None:
        has_record = True
        if mine.clock != clock:
            if settings.update != "all":
                findings.append(Finding("stale", (_other_clock(stored, mine, timing),)))
        else:
            held = mine.value
            if settings.update != "all":  # else it is to be replaced, and only the claim counts
                margin = verdict.record_margin(spread, session, clock)
                gates += verdict.record_gates(mine.value, margin)
                differences = stored.environment_differences(
                    mine, timing.environment, timing.sources, clock
                )
                same_environment = not differences
                chosen = timing.details.get("choices", {})
                differences += autotune.differing_choices(mine.choices, chosen)
    detectable = verdict.detectable(gates, spread, session) if gates else None
    with remeasuring(client, client.vote) as vote:
        decision = verdict.decide(timing.reading, gates, vote)
    votes = [vote.value for vote in decision.votes]
    if votes:
        # The first value was singled out for being extreme; the votes were not.
        client.notes.append(
            f"measured {1 + len(votes)} times; the first gave {ratio(timing.reading.value)}"
        )
    word = verdict.verdict_of(decision, stored=has_record, same_environment=same_environment)
    reasons = list(client.missing_votes)
    reasons += _missed_gates(gates, decision, timing.reading.value, differences, stored)
    findings.append(Finding(word, tuple(reasons)))
    return Judgement(
        votes=votes,
        suspect=_direction(gates, timing.reading) if decision.suspect else 0,
        session=session,
        detectable=detectable,
        stored=held,
        stored_in=stored.relative(),
        differences=differences,
        findings=findings,
    )


def _claim_gates(claim: float | str | None, timing: Timing) -> list[Gate]:
    if claim == "neutral":
        floor = verdict.NEUTRAL_FLOOR[timing.clock]
        return [verdict.neutral_gate(max(floor, verdict.DETECTABLE * timing.spread))]
    if claim == "yardstick":
        return []
    return [verdict.claim_gate(float(claim or 1.0), timing.spread)]


def _other_clock(stored: StoredResult, mine: models.Result, timing: Timing) -> str:
    """Say that the stored result was timed by another clock, and why today's differs."""
    keys = ("no graph", "no queue")
    why = next((f": {timing.details[k]}" for k in keys if k in timing.details), "")
    return (
        f"timed on the {timing.clock} clock{why}; the result stored in {stored.relative()} is"
        f" of the {mine.clock} clock: not compared"
    )


def _direction(gates: list[Gate], first: verdict.Reading) -> int:
    past = [g.sign for g in gates if g.name != "claim" and g.decide(first, []) != "clear"]
    return past[0] if past else 0


def _missed_gates(
    gates: list[Gate],
    decision: verdict.Decision,
    first: float,
    differences: list[str],
    stored: StoredResult,
) -> list[str]:
    """Say for each missed gate which number missed which limit, and where the limit is written."""
    origin = {
        "claim": "at_least on the page",
        "neutral": "at_least='neutral' on the page",
        "record": f"stored in {stored.relative()}",
        "improvement": f"stored in {stored.relative()}",
        "same-slower": "the same side, built again",
        "same-faster": "the same side, built again",
    }
    reasons = []
    votes = ", ".join(bare(vote.value) for vote in decision.votes) or "none"
    for gate in gates:
        outcome = decision.outcomes[gate.name]
        if outcome in ("clear", "green"):
            continue
        reasons.append(
            f"{ratio(first)} against {ratio(gate.limit)} ({origin[gate.name]}),"
            f" margin {gate.red:.1%}; votes of fresh processes: {votes} -> {outcome}"
        )
        if gate.name in ("record", "improvement"):
            reasons += differences
    return reasons


def judge_changed_side(
    client: CaseClient, stored: StoredResult, timing: Timing, role: str
) -> list[Finding]:
    """Judge a changed side against its version at the commit: red for a loss that votes confirm."""
    past = client.run.past
    name = client.case.variant_name
    name = client.case.pair.baseline.__name__ if role == "baseline" else name
    try:
        first = client.time_against(role, 0)
    except Failed as failure:
        why = failure.finding.reasons[0] if failure.finding else str(failure).splitlines()[0]
        client.remarks.append(f"{name} is not compared with its version at the commit: {why}")
        return []
    gate = verdict.code_gate(stored.spread(timing.clock), first)
    with remeasuring(client, lambda *process: client.time_against(role, *process)) as vote:
        decision = verdict.decide(first, [gate], vote)
    votes = [vote.value for vote in decision.votes]
    value = fmean(votes) if votes else first.value
    commits = past.label if past is not None else ""
    smallest = 1 - math.exp(-verdict.DETECTABLE_CODE * gate.spread)
    client.notes.append(
        f"{name} against its version at {commits}: {ratio(value)}; detects {smallest:.1%}"
    )
    listed = ", ".join(map(bare, votes)) or "none"
    outcome = decision.outcomes["code"]
    reason = (
        f"{name} runs at {ratio(value)} of its version at {commits}: margin {gate.red:.2%};"
        f" votes of fresh processes: {listed} -> {outcome}"
    )
    words = {"red": "regressed", "open": "inconclusive"}
    return [Finding(words[outcome], (reason,))] if outcome in words else []


def judge_metric(
    stored: StoredResult,
    name: str,
    found: Mapping[str, float],
    limit: float,
    environment: Mapping[str, Any],
    sources: Mapping[str, str],
    speedup: Judgement | None,
) -> MetricJudgement:
    """Hold both sides' `found` amounts of a metric against the page's limit and the stored one."""
    settings, metric = stored.run.settings, METRICS[name]
    if settings.aa:
        return MetricJudgement(found, limit)
    text = f"{name}: {metric.said(found, limit)}"
    mine = stored.result
    before = mine.goals.get(name) if mine is not None else None
    judged = MetricJudgement(found, limit, before["optimized"] if before else None, text)
    if metric.missed(found, limit):
        reason = f"{text} ({metric.asked} on the page) -> red"
        judged.findings.append(Finding("fail", (reason,)))
    elif mine and before and settings.update != "all" and metric.worse(before, found):
        differences = list(speedup.differences) if speedup is not None else []
        differences = differences or stored.environment_differences(
            mine, environment, sources, mine.clock or ""
        )
        now, then = metric.unit(found["optimized"]), metric.unit(before["optimized"])
        reason = f"{name}: {now} against {then} (stored in {stored.relative()}) -> red"
        word = "stale" if differences else "regressed"
        judged.findings.append(Finding(word, (reason, *differences)))
    else:
        judged.findings.append(Finding("new" if before is None else "pass"))
    return judged


def judge_recorded_claim(
    claim: float | str | None, claim_origin: str, values: list[float], word: str
) -> None:
    """Refuse to record a claim that votes left open and all recorded processes together miss.

    Raises:
        Failed: where the mean of `values` is below the claim.
    """
    if word != "inconclusive" or not isinstance(claim, (int, float)):
        return
    mean, limit = fmean(values), math.log(claim)
    if mean < limit:
        raise Failed(
            f"{ratio(mean)} in {len(values)} processes is below {bare(limit)} ({claim_origin}):"
            " not stored"
        )


def judge_aa_repeat(
    client: CaseClient, spread: float, number: int
) -> tuple[float, str, list[float]]:
    """Repeat an A/A trial in process `number`; return its value, its verdict and its votes."""
    found = reading(client.time(100 + number, client.worker(number)))
    gates = verdict.same_gates(verdict.effective_spread(spread, found))
    with remeasuring(client, client.vote) as vote:
        decision = verdict.decide(found, gates, vote)
    word = verdict.verdict_of(decision, stored=True, same_environment=True)
    return found.value, word, [vote.value for vote in decision.votes]
