"""Build the row of a case from the results of its stages."""

from __future__ import annotations

from statistics import fmean

from ..results import verdict
from ..results.row import Row
from .case import CaseRun
from .judge import Judgement
from .measurement import Timing


def build_row(run: CaseRun) -> Row:
    """Return everything that is said about the case of `run`, after its last stage."""
    client, case, metrics = run.client, run.case, run.metrics
    measured = run.timing is not None or bool(metrics)
    row = Row(
        nodeid=run.where["nodeid"],
        file=str(client.path),
        key=run.stored.key,
        page=run.where["page"],
        function=run.where["function"],
        variant=case.variant_name,
        size=dict(case.size),
        bound=case.pair.bound,
        gpus=case.gpus,
        baseline=case.pair.baseline.__name__,
        product=client.machine.with_count(case.gpus),
        arch=client.machine.arch,
        need=run.placement.need,
        verdict=run.verdict,
        claim=run.claim,
        origins={"claim": run.claim_origin} if run.claim is not None else {},
        trials=run.trials,
        reasons=run.reasons(),
        notes=list(run.notes),
        remarks=[*run.remarks, *(m.remark for m in metrics.values() if m.remark)],
        goals={name: dict(m.found) for name, m in metrics.items()},
        limits={name: m.limit for name, m in metrics.items()},
        held={name: m.stored for name, m in metrics.items() if m.stored is not None},
        profile=run.profile,
        recorded=run.recorded,
        sources=run.sources() if measured else {},
        environment=run.environment() if measured else {},
        checks=run.checks,
        timings=client.timings,
        against=client.against,
        wall=run.wall,
    )
    if run.timing is not None:
        _fill_timing(row, run.timing, run.values)
    if run.judgement is not None:
        _fill_judgement(row, run.judgement)
    return row


def _fill_timing(row: Row, timing: Timing, values: list[float]) -> None:
    """Put the timing in `row`; its ln(speedup) is the mean of `values`."""
    row.clock, row.spread = timing.clock, timing.spread
    row.work = dict(timing.answer["work"])
    row.seconds = dict(timing.seconds)
    row.launch_bound = timing.launch_bound
    row.share, row.limit = timing.share, timing.limit
    row.value = fmean(values)
    row.low, row.high = verdict.interval(row.value, timing.spread, len(values))
    if timing.limit_origin:
        row.origins["limit"] = timing.limit_origin


def _fill_judgement(row: Row, judged: Judgement) -> None:
    row.votes, row.suspect, row.session = judged.votes, judged.suspect, judged.session
    row.detectable, row.stored = judged.detectable, judged.stored
    if judged.stored is not None:
        row.origins["stored"] = judged.stored_in
