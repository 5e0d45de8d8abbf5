"""Judge a case: compare its speedup and its changed sides with their limits.

The functions return findings. `results.verdict.case_verdict` computes the verdict from these.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean

from ..page.pair import Claim
from ..results import models, verdict
from ..results.row import bare, ratio
from ..results.verdict import CODE_IS_AS_FAST, Cause, Decision, Finding, Gate, Reading
from ..worker.client import Worker
from .case_client import CaseClient, reading
from .cause import SAME_CODE, cause_of, evidence
from .code_gate import with_compiler
from .measurement import Timing
from .run_context import Failed, Unrecorded
from .stored_result import Differences, StoredResult


@dataclass
class Judgement:
    """The outcome of the gates for a speedup. Every value is in ln(speedup).

    Attributes:
        votes: the values of the fresh processes.
        suspect: 1 for a suspected loss, -1 for a suspected gain, 0 if the case is not a suspect.
        session: the standard deviation of ln(speedup) between sessions.
        detectable: the smallest loss that is detected in 99 % of trials; None without gates.
        stored, stored_in: the stored value, and its file.
        differences: other possible causes of a loss against the stored result.
    """

    votes: list[float]
    suspect: int
    session: float
    detectable: float | None
    stored: float | None
    stored_in: str
    differences: Differences
    findings: list[Finding]


def judge_speedup(
    client: CaseClient, stored: StoredResult, timing: Timing, claim: Claim | None
) -> Judgement:
    """Compare the speedup with the claim and the stored result. If in doubt, measure again."""
    settings, clock, spread = client.run.settings, timing.clock, timing.spread
    session, mine = stored.session_spread(clock), stored.result
    has_record = mine is not None and mine.value is not None and not settings.aa
    replaces = settings.update == "all"  # then only the claim has a gate
    gates = list(verdict.same_gates(spread)) if settings.aa else _claim_gates(claim, timing)
    findings: list[Finding] = []
    differences = Differences()
    record: float | None = None
    if mine is not None and has_record and not replaces:
        differences = stored.differences(
            mine, timing.environment, timing.sources, clock, timing.details.get("choices")
        )
    if mine is not None and has_record and mine.clock == clock:
        record = mine.value
    elif mine is not None and has_record and not replaces and stored.case.judged:
        reason = _other_clock(stored, mine, timing)
        cause = cause_of(client, stored, differences, timing.sources)
        findings.append(Finding("stale", (reason, *evidence(client, stored, differences)), cause))
    if record is not None and not replaces:
        gates += verdict.record_gates(record, verdict.record_margin(spread, session, clock))
    if not stored.case.judged and not settings.aa:
        gates, differences = [], Differences()
    decision = _decide(client, timing.reading, gates, client.vote)
    differences = with_compiler(client, stored, differences, decision)
    votes = [vote.value for vote in decision.votes]
    if votes:
        # Only the votes are averaged. The first value is biased, because only extreme values lead
        # to votes.
        client.notes.append(
            f"measured {1 + len(votes)} times; the first gave {ratio(timing.reading.value)}"
        )
    word = verdict.verdict_of(
        decision, stored=has_record or settings.aa, same_environment=differences.same_environment
    )
    reasons = list(client.missing_votes)
    reasons += _missed_gates(gates, decision, timing.reading.value, stored)
    cause = _noise(decision) if word == "inconclusive" else ""
    if word in (*verdict.RED, "stale"):
        reasons += evidence(client, stored, differences)
        cause = cause_of(client, stored, differences, timing.sources)
    elif any(decision.outcomes.get(name) in ("red", "open") for name in ("record", "improvement")):
        reasons += [*differences.lines(), *[SAME_CODE] * stored.has_recorded_code]
    findings.append(Finding(word, tuple(reasons), cause, missed_limit=word == "fail"))
    return Judgement(
        votes=votes,
        suspect=_direction(gates, timing.reading) if decision.suspect else 0,
        session=session,
        detectable=verdict.detectable(gates, spread, session) if gates else None,
        stored=record,
        stored_in=stored.relative(),
        differences=differences,
        findings=findings,
    )


def _claim_gates(claim: Claim | None, timing: Timing) -> list[Gate]:
    if claim == "neutral":
        floor = verdict.NEUTRAL_FLOOR[timing.clock]
        return [verdict.neutral_gate(max(floor, verdict.DETECTABLE * timing.spread))]
    if claim == "yardstick":
        return []
    return [verdict.claim_gate(float(claim or 1.0), timing.spread)]


def _other_clock(stored: StoredResult, mine: models.Result, timing: Timing) -> str:
    """Return a message that the stored result is on another clock and was not compared."""
    keys = ("no graph", "no queue")
    why = next((f": {timing.details[k]}" for k in keys if k in timing.details), "")
    return (
        f"timed on the {timing.clock} clock{why}; the result stored in {stored.relative()} is"
        f" of the {mine.clock} clock: not compared"
    )


def _direction(gates: list[Gate], first: Reading) -> int:
    past = [g.sign for g in gates if g.name != "claim" and g.decide(first, []) != "clear"]
    return past[0] if past else 0


def _missed_gates(
    gates: list[Gate],
    decision: Decision,
    first: float,
    stored: StoredResult,
) -> list[str]:
    """Return a reason for each missed gate: the value, the limit, and the limit's origin."""
    versus = stored.case.pair.versus
    origin = {
        "claim": f"at_least{f' of {versus}' if versus else ''} on the page",
        "neutral": "at_least='neutral' on the page",
        "record": f"stored in {stored.relative()}",
        "improvement": f"stored in {stored.relative()}",
        "same-slower": "the same side, built again",
        "same-faster": "the same side, built again",
    }
    reasons = []
    for gate in gates:
        outcome = decision.outcomes[gate.name]
        if outcome in ("clear", "green"):
            continue
        reasons.append(
            f"{ratio(first)} against {ratio(gate.limit)} ({origin[gate.name]}),"
            f" margin {gate.red:.1%}; votes of fresh processes: {_listed(decision)} -> {outcome}"
        )
    return reasons


def _noise(decision: Decision) -> Cause:
    """Return the cause of a decision without a majority: noise, if all votes were counted."""
    return "noise" if len(decision.votes) == verdict.ATTEMPTS else ""


def _listed(decision: Decision) -> str:
    return ", ".join(bare(vote.value) for vote in decision.votes) or "none"


def judge_changed_side(
    client: CaseClient, stored: StoredResult, timing: Timing, role: str
) -> list[Finding]:
    """Compare a changed side with its old version."""
    name, past = client.side_name(role), client.past
    where = past.label if past is not None else "in the replayed run"
    try:
        first = client.time_against(role, 0)
    except Failed as failure:
        why = failure.finding.reasons[0] if failure.finding else str(failure).splitlines()[0]
        client.remarks.append(f"{name} is {verdict.NOT_COMPARED} {where}: {why}")
        return []
    gate = verdict.code_gate(stored.spread(timing.clock), first)
    again = functools.partial(client.time_against, role)
    found = judge_against(client, name, first, gate, again, f"its version {where}", "code")
    return found or [CODE_IS_AS_FAST]


def judge_against(
    client: CaseClient,
    name: str,
    first: Reading,
    gate: Gate,
    measure: Measure,
    than: str,
    cause: Cause,
) -> list[Finding]:
    """Compare the side `name` with an earlier version, or with itself in another environment.

    Args:
        first: the first measured ln(time there / time here).
        measure: a function that measures this value again in a fresh process.
        than: a phrase that describes the other version or environment.
        cause: the cause to report if the side is slower today.

    Returns:
        The findings; empty if the side is not slower.
    """
    known = len(client.missing_votes)
    decision = _decide(client, first, [gate], measure)
    value = fmean(vote.value for vote in decision.votes or (first,))
    smallest = 1 - math.exp(-verdict.DETECTABLE_CODE * gate.spread)
    client.notes.append(f"{name} against {than}: {ratio(value)}; detects {smallest:.1%}")
    outcome = decision.outcomes[gate.name]
    if outcome in ("clear", "green"):
        return []
    reason = (
        f"{name} runs at {ratio(value)} of {than}: margin {gate.red:.2%};"
        f" votes of fresh processes: {_listed(decision)} -> {outcome}"
    )
    if outcome == "red":
        return [Finding("regressed", (reason,), cause)]
    return [Finding("inconclusive", (*client.missing_votes[known:], reason), _noise(decision))]


def judge_recorded_claim(
    claim: Claim | None, claim_origin: str, values: list[float], word: str
) -> None:
    """Refuse to record if the claim was inconclusive and the mean of all processes misses it.

    Raises:
        Failed: if the mean of `values` is below the claim.
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
    first = reading(client.time(100 + number, client.worker(number)))
    gates = verdict.same_gates(verdict.effective_spread(spread, first))
    decision = _decide(client, first, gates, client.vote)
    word = verdict.verdict_of(decision, stored=True, same_environment=True)
    return first.value, word, [vote.value for vote in decision.votes]


def _decide(
    client: CaseClient, first: Reading, gates: Sequence[Gate], measure: Measure
) -> Decision:
    with remeasuring(client, measure) as vote:
        return verdict.decide(first, gates, vote)


Measure = Callable[[int, Worker], Reading]
"""A function that measures in the fresh process with the given number, and returns a reading."""


@contextmanager
def remeasuring(client: CaseClient, measure: Measure) -> Iterator[Callable[[], Reading | None]]:
    """Yield a function that starts one more fresh process at each call and measures in it.

    The function returns None if the run's budget for votes is spent, or if a replayed run has no
    more samples. On GPU clocks, the processes for the first three votes start together, because
    importing torch takes most of a vote's time.
    """
    run, waiting, taken = client.run, list[Worker](), 0

    def process() -> Worker:
        if run.replay is not None:
            return run.replay
        if taken == 0 and client.ranks == 1 and _clock(client) not in models.HOST_CLOCKS:
            waiting.extend(client.fresh_worker() for _ in range(verdict.VOTES))
        return waiting.pop(0) if waiting else client.fresh_worker()

    def vote() -> Reading | None:
        nonlocal taken
        if run.vote_seconds > run.settings.confirm_budget:
            client.notes.append("aisp_confirm_budget is spent: no more votes in this run")
            return None
        worker = process()
        taken += 1
        return _vote(client, measure, worker)

    try:
        yield vote
    finally:
        for worker in waiting:
            worker.close()


def _vote(client: CaseClient, measure: Measure, worker: Worker) -> Reading | None:
    run, start = client.run, time.monotonic()
    number = len(client.timings) + len(client.against)
    name = f"vote of fresh process {number}"
    run.progress(f"vote {number} in a fresh process")
    try:
        vote = measure(number, worker)
        measured = f"{ratio(vote.value)}, error {vote.error:.2%}, {_clock(client)} clock"
        client.notes.append(f"{name}: {measured}")
        return vote
    except Unrecorded as failure:
        client.missing_votes.append(str(failure).splitlines()[0])
        return None
    except Failed as failure:
        client.notes.append(f"{name}: {str(failure).splitlines()[0]}")
        raise
    finally:
        if run.replay is None:
            worker.close()
        run.vote_seconds += time.monotonic() - start


def _clock(client: CaseClient) -> str:
    latest = client.against[-1][1] if client.against else client.timings[-1]
    return latest.clock
