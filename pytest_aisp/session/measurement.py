"""Build a case's timing from a worker's reply, and the row that reports the case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

import msgspec

from ..kernels.capture_launches import choice_notes
from ..page.cost import cost_at, is_seen, place_of
from ..page.pair import Work, side_name
from ..results import models, stats, verdict
from ..results.messages import Json
from ..results.notes import (
    cpu_note,
    graph_notes,
    launch_bound,
    launch_bound_note,
    memory_note,
    predicted_note,
    unused_limit,
)
from ..results.row import Row, duration
from ..results.task_results import TimeResult
from ..results.verdict import Reading
from ..timing import peaks
from ..timing.cross_check import KernelProfile, kernel_notes
from ..timing.data_sheets import most_above
from ..timing.predict import RateMissing, explains, predict
from .case_client import CaseClient, reading
from .run_context import Failed
from .stored_result import StoredResult

if TYPE_CHECKING:
    from .case import CaseRun

TOO_FAST = "rate allows for the declared work"
"""Part of the reason why a side that is faster than the machine's limit is refused."""


@dataclass(frozen=True)
class Timing:
    """The timing of a case in the first worker process.

    Attributes:
        result: the full result of that process.
        spread: the spread of one process's ln(speedup).
        reading: the process's ln(speedup) and its error.
        seconds: seconds per call, keyed by the name of the side, with the baseline first.
        launch_bound: for each launch-bound side, the time of a call without a CUDA graph divided by
            the time with one.
        share: the share of the machine's limit that the optimized side reaches.
        limit, limit_origin: the limit's name, and the file in which the limit is stored.
        shortest: the shortest time per call that the limit allows, in seconds. It is set only if a
            side is faster than this.
        predicted: the predicted seconds per call, keyed like `seconds`.
    """

    result: TimeResult
    reading: Reading
    clock: str
    spread: float
    seconds: Mapping[str, float]
    environment: dict[str, Json]
    sources: dict[str, str]
    launch_bound: dict[str, float]
    share: float | None = None
    limit: str = ""
    limit_origin: str = ""
    shortest: float | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)

    @property
    def details(self) -> Mapping[str, Json]:
        """Further facts from the timer: graph nodes, memory, times on other clocks."""
        return self.result.details

    @property
    def pair_seconds(self) -> tuple[float, ...]:
        """Seconds per call of the baseline and of the variant."""
        return tuple(self.seconds.values())

    def with_seconds(self, seconds: Sequence[float]) -> Timing:
        """Return this timing with other `seconds` per call, which come from all processes."""
        share = self.share and self.share * self.pair_seconds[1] / seconds[1]
        return replace(self, seconds=dict(zip(self.seconds, seconds, strict=True)), share=share)

    def refuse_impossible(self) -> None:
        """Raise `Failed` if a side is faster than the machine's limit allows."""
        if self.shortest is not None:
            raise Failed(
                f"{duration(min(self.pair_seconds))} is less than the {duration(self.shortest)}"
                f" that this machine's {self.limit} {TOO_FAST}:\n"
                "the work is overstated, or a side does less of it",
                verdict="invalid",
            )


def read_timing(client: CaseClient, stored: StoredResult, result: TimeResult) -> Timing:
    """Return the timing from a worker process's `result`. Add its other facts to the notes."""
    clock, first, details = result.clock, reading(result), result.details
    variant = client.case.variant_name
    aa = client.run.settings.aa
    baseline = f"{variant}, a copy" if aa else client.case.pair.baseline.__name__
    seconds = {baseline: median(result.baseline), variant: median(result.optimized)}
    launches = {}
    if "as_called" in details:
        launches = launch_bound(clock, seconds, details["as_called"])
    _add_notes(client, seconds, result, launches)
    timing = Timing(
        result=result,
        reading=first,
        clock=clock,
        spread=verdict.effective_spread(stored.spread(clock), first),
        seconds=seconds,
        environment=client.environment(),
        sources=dict(result.sources),
        launch_bound=launches,
    )
    return with_prediction(client, with_limit(client, stored, timing))


def _add_notes(
    client: CaseClient,
    seconds: Mapping[str, float],
    result: TimeResult,
    launches: Mapping[str, float],
) -> None:
    """Add notes about clocks, goodput, graphs, memory, CPU time, kernels and one-off costs."""
    details, notes = result.details, client.notes
    for key in ("as_called", "gpu_only"):
        if key in details:
            times = " / ".join(duration(t) for t in details[key])
            notes.append(f"{key.replace('_', ' ')}: {times}")
    if launches:
        client.remarks.append(launch_bound_note(launches))
    if "gpu_only" in details:
        busy = zip(details["gpu_only"], seconds.values(), strict=True)
        shares = " / ".join(f"{min(1.0, gpu / wall):.0%}" for gpu, wall in busy)
        notes.append(f"goodput, GPU time over wall time: {shares}")
    notes += graph_notes(tuple(seconds), details)
    if "peak_bytes" in details:
        text, traded = memory_note(details["peak_bytes"])
        (client.remarks if traded else notes).append(text)
    if "cpu_shares" in details:
        text, waits = cpu_note(tuple(seconds), details["cpu_shares"])
        (client.remarks if waits else notes).append(text)
    kernels = result.kernels or {}
    notes += kernel_notes({name: KernelProfile(**counts) for name, counts in kernels.items()})
    notes += choice_notes(details.get("choices", {}))
    baseline, optimized = seconds.values()
    for name, cost in (result.one_off or {}).items():
        if cost:
            gain = baseline - optimized
            calls = f"pays after {cost / gain:.3g} calls" if gain > 0 else "never pays"
            notes.append(f"preparing {name} took {duration(cost)}: {calls}")


def with_limit(client: CaseClient, stored: StoredResult, timing: Timing) -> Timing:
    """Add the share of the machine's limit to `timing`, if the machine's peaks are stored."""
    run, case = client.run, client.case
    rates = _rates(client)
    if rates is None or run.settings.aa:
        return timing
    limit = peaks.limit_of(msgspec.convert(timing.result.work, Work), case.pair.bound, rates)
    if limit is None:
        return timing
    product = client.machine.with_count(case.gpus if limit.name in peaks.LINKS else 1, run.nodes)
    path: Path = peaks.path_of(run.settings.baselines, product)
    cold = case.pair.l2 == "cold" and timing.clock == "graph"
    most = most_above(client.machine.product, limit.name, rates.rates[limit.name])
    impossible = cold and peaks.implausible(limit, min(timing.pair_seconds), most)
    share = peaks.share(limit, timing.pair_seconds[1])
    if text := unused_limit(timing.seconds, share, limit.name):
        client.remarks.append(text)
    return replace(
        timing,
        share=share,
        limit=limit.name,
        limit_origin=stored.relative(path),
        shortest=limit.seconds / most if impossible else None,
    )


def _rates(client: CaseClient) -> peaks.Peaks | None:
    """Return the stored peaks of one GPU and of the links between GPUs, or None."""
    run, gpus = client.run, client.case.gpus
    rates = run.peaks(client.machine.product)
    if gpus == 1:
        return rates
    several = client.machine.with_count(gpus, run.nodes)
    return peaks.joined(rates, run.peaks(several, measure=False))


def with_prediction(client: CaseClient, timing: Timing) -> Timing:
    """Add predicted times to `timing`, if both sides declare a cost and the rates are known."""
    case, run, rates = client.case, client.run, _rates(client)
    if case.gpus > 1 and run.nodes == 1:
        rates = peaks.with_peer(rates, run.peaks(client.machine.with_count(2), measure=False))
    sides = (case.pair.baseline, case.variant.side)
    costs = [cost_at(case.pair, side, case.size, case.gpus) for side in sides]
    known = [cost for cost in costs if cost is not None]
    if rates is None or client.run.settings.aa or len(known) < len(sides):
        return timing
    times: list[float] = []
    for side, cost in zip(sides, known, strict=True):
        try:
            times.append(predict(cost, rates, graph=timing.clock == "graph").seconds)
        except RateMissing as missing:
            place, why = place_of(case.pair.costs[side]), " ".join(str(missing).split())
            client.notes.append(f"not predicted: {place}: the cost of {side_name(side)}: {why}")
            return timing
    if min(times) <= 0:  # host steps take no time in a graph, so a cost with nothing else is zero
        return timing
    return replace(timing, predicted=dict(zip(timing.seconds, times, strict=True)))


def _add_prediction(row: Row, timing: Timing, seen: str) -> None:
    """Add the predicted times to `row`, and the sides with other times that `seen` leaves out."""
    row.predicted = dict(timing.predicted)
    row.unexplained = [
        name
        for role, (name, time) in zip(models.ROLES, row.predicted.items(), strict=False)
        if not explains(time, row.seconds[name]) and not is_seen(name, role, seen)
    ]
    if row.predicted:
        row.notes.append(predicted_note(row.predicted, row.seconds, row.unexplained))


def build_row(run: CaseRun) -> Row:
    """Return the row of a case after its last stage."""
    client, case, location, metrics = run.client, run.case, run.location, run.metrics
    timing, judged = run.timing, run.judgement
    measured = timing is not None or bool(metrics)
    failures = [finding for finding in run.findings if finding.verdict == "fail"]
    row = Row(
        nodeid=location.nodeid,
        file=str(client.path),
        key=run.stored.key,
        page=str(location.page),
        function=location.function,
        variant=case.variant_name,
        size=dict(case.size),
        bound=case.pair.bound,
        gpus=case.gpus,
        sweep=case.pair.sweep.key if case.pair.sweep is not None else "",
        baseline=case.pair.baseline.__name__,
        product=client.machine.with_count(case.gpus, client.run.nodes),
        arch=client.machine.arch,
        need=run.placement.need,
        verdict=run.verdict,
        cause=run.cause,
        missed_limit=bool(failures) and all(failure.missed_limit for failure in failures),
        claim=run.claim,
        versus=case.pair.versus or "",
        origins={"claim": run.claim_origin} if run.claim is not None else {},
        trials=run.trials,
        reasons=run.reasons(),
        notes=list(run.notes),
        remarks=[*run.remarks, *(m.remark for m in metrics.values() if m.remark)],
        goals={name: dict(m.amounts) for name, m in metrics.items()},
        limits={name: m.limit for name, m in metrics.items()},
        held={name: m.stored for name, m in metrics.items() if m.stored is not None},
        profile=run.profile,
        recorded=run.recorded,
        sources=run.sources() if measured else {},
        unchanged=list(client.unchanged),
        machine_code=client.machine_code or {},
        environment=run.environment() if measured else {},
        checks=msgspec.to_builtins(run.checks),
        timings=msgspec.to_builtins(client.timings),
        against=[{"side": role, **msgspec.to_builtins(result)} for role, result in client.against],
        wall=run.wall,
    )
    if timing is not None:
        row.clock, row.spread = timing.clock, timing.spread
        row.work = timing.result.work
        row.seconds = dict(timing.seconds)
        row.launch_bound = timing.launch_bound
        row.errors = {name: share for name, share in timing.result.relative.items() if share > 0}
        sides = (row.baseline, case.pair.baseline_precision), (row.variant, case.variant.precision)
        row.precisions = {name: precision for name, precision in sides if precision}
        _add_prediction(row, timing, location.seen)
        row.share, row.limit = timing.share, timing.limit
        row.value = fmean(run.values)
        row.low, row.high = stats.interval(row.value, timing.spread, len(run.values))
        if timing.limit_origin:
            row.origins["limit"] = timing.limit_origin
    if judged is not None:
        row.votes, row.suspect, row.session = judged.votes, judged.suspect, judged.session
        row.detectable, row.stored = judged.detectable, judged.stored
        if judged.stored is not None:
            row.origins["stored"] = judged.stored_in
    return row
