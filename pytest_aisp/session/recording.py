"""Time a case in more processes, to record its result or to repeat an A/A trial."""

from __future__ import annotations

from statistics import geometric_mean, median
from typing import TYPE_CHECKING

from ..kernels.capture_launches import merge_choices
from ..page.pair import ROLES
from ..results.row import Recording
from ..results.verdict import Finding
from .code_gate import machine_code
from .judge_case import judge_aa_repeat, judge_recorded_claim
from .measurement import Timing
from .run_context import Failed

if TYPE_CHECKING:
    from .case import CaseRun


def record(case: CaseRun, timing: Timing) -> None:
    """Measure the case in all recording processes, and prepare its result for the recorder.

    The recorded values include the values of votes, not only the first value.
    """
    count = 1 if timing.clock == "process" else case.run.settings.processes
    results = list(case.client.timings)
    for number in range(len(results), count):
        case.run.progress(f"record {number + 1}/{count}")
        results.append(case.client.time(100 + number, case.client.worker(number)))
    case.values = [result.value for result in results]
    judge_recorded_claim(case.claim, case.claim_origin, case.values, case.verdict)
    # The stored speedup is a geometric mean over the processes, so the times must be, too.
    seconds = [geometric_mean(median(getattr(r, role)) for r in results) for role in ROLES]
    case.timing = timing = timing.with_seconds(seconds)
    case.recorded = Recording(
        values=[case.values],
        clock=timing.clock,
        baseline_us=seconds[0] * 1e6,
        optimized_us=seconds[1] * 1e6,
        share=timing.share,
        limit=timing.limit or None,
        choices=merge_choices(r.details.get("choices", {}) for r in results),
    )
    add_sources_and_metrics(case)


def add_sources_and_metrics(case: CaseRun) -> None:
    """Add the digests of the code and the measured metrics to the result that will be stored."""
    recorded = case.recorded
    recorded.sources, recorded.text_sources = case.sources(), case.stored.text_sources
    recorded.files = case.stored.files(case.location.page)
    recorded.machine_code = machine_code(case.client) if any(case.kernels) else {}
    recorded.goals = {name: dict(judged.amounts) for name, judged in case.metrics.items()}
    recorded.replace = case.run.settings.update == "all"


def repeat_aa(case: CaseRun, timing: Timing) -> None:
    """Repeat an A/A trial in more processes. Each process is a separate trial."""
    spread = case.stored.spread(timing.clock)
    case.trials.append((timing.reading.value, case.verdict))
    for number in range(1, case.run.settings.processes):
        value, word, votes = judge_aa_repeat(case.client, spread, number)
        case.trials.append((value, word))
        case.findings.append(Finding(word))
        if case.judgement is not None:
            case.judgement.votes += votes
    if len(case.trials) > 1:
        case.values = [value for value, _ in case.trials]
    if case.verdict == "regressed":
        message = "a side differs from a copy of itself"
        raise Failed("\n".join([message, *case.client.commands()]), verdict=None)
