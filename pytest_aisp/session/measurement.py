"""What the first worker process measured, with the machine's limit and the words for the row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from ..kernels import autotune
from ..page.pair import Work
from ..results import verdict
from ..results.row import duration, graph_notes, launch_bound, launch_bound_note, memory_note
from ..results.verdict import Reading
from ..timing import kernel_profile, peaks
from .case_client import CaseClient, reading
from .run_context import Failed
from .stored_result import StoredResult


@dataclass(frozen=True)
class Timing:
    """One case's timing.

    Attributes:
        answer: the first process's full answer.
        spread: of one process's ln(speedup).
        seconds: of a call, by side, the baseline's first.
        share, limit, limit_origin: share of the machine's limit that the optimized side reaches,
            the limit's name, and the file that holds it.
        shortest: least seconds that the machine's limit allows, where the L2 is cold.
        launch_bound: by side, how many times longer a call takes without a graph, where much.
    """

    answer: Mapping[str, Any]
    reading: Reading
    clock: str
    spread: float
    seconds: Mapping[str, float]
    environment: dict[str, Any]
    sources: dict[str, str]
    launch_bound: dict[str, float]
    share: float | None = None
    limit: str = ""
    limit_origin: str = ""
    shortest: float | None = None

    @property
    def details(self) -> Mapping[str, Any]:
        """The timer's own facts: graph nodes, memory, other clocks."""
        details: Mapping[str, Any] = self.answer["details"]
        return details

    @property
    def pair_seconds(self) -> tuple[float, ...]:
        """Seconds of a call of the baseline and of the variant."""
        return tuple(self.seconds.values())

    def with_seconds(self, seconds: Sequence[float]) -> Timing:
        """Return this timing with the seconds of all recorded processes."""
        return replace(self, seconds=dict(zip(self.seconds, seconds, strict=True)))

    def refuse_impossible(self) -> None:
        """Raise `Failed` for a side that is faster than the machine can be."""
        seconds = min(self.pair_seconds)
        if self.shortest is not None:
            raise Failed(
                f"{duration(seconds)} is less than the {duration(self.shortest)} that this"
                f" machine's measured {self.limit} rate allows for the declared work:\n"
                "the work is overstated, or a side does less of it",
                verdict="invalid",
            )


def read_timing(client: CaseClient, stored: StoredResult, answer: Mapping[str, Any]) -> Timing:
    """Return the timing in a worker process's `answer`; note in `client` what else it says."""
    clock, first = str(answer["clock"]), reading(answer)
    names = _names(client)
    medians = median(answer["baseline"]), median(answer["optimized"])
    seconds = dict(zip(names, medians, strict=True))
    details = answer["details"]
    slow = {}
    if "as_called" in details:
        slow = launch_bound(clock, seconds, details["as_called"])
    _note(client, names, seconds, answer, slow)
    timing = Timing(
        answer=answer,
        reading=first,
        clock=clock,
        spread=verdict.effective_spread(stored.spread(clock), first),
        seconds=seconds,
        environment=client.environment(),
        sources=dict(answer["sources"]),
        launch_bound=slow,
    )
    return with_limit(client, stored, timing)


def _names(client: CaseClient) -> tuple[str, str]:
    variant = client.case.variant_name
    if client.run.settings.aa:
        return f"{variant}, a copy", variant
    return client.case.pair.baseline.__name__, variant


def _note(
    client: CaseClient,
    names: tuple[str, str],
    seconds: Mapping[str, float],
    answer: Mapping[str, Any],
    slow: Mapping[str, float],
) -> None:
    """Note other clocks, goodput, graphs, memory, kernels, tuning and one-off costs."""
    details, notes = answer["details"], client.notes
    for key in ("as_called", "gpu_only"):
        if key in details:
            times = " / ".join(duration(t) for t in details[key])
            notes.append(f"{key.replace('_', ' ')}: {times}")
    if slow:
        client.remarks.append(launch_bound_note(slow))
    if "gpu_only" in details:
        busy = zip(details["gpu_only"], seconds.values(), strict=True)
        shares = " / ".join(f"{min(1.0, gpu / wall):.0%}" for gpu, wall in busy)
        notes.append(f"goodput, GPU time over wall time: {shares}")
    notes += graph_notes(names, details)
    if "peak_bytes" in details:
        text, traded = memory_note(details["peak_bytes"])
        (client.remarks if traded else notes).append(text)
    notes += kernel_profile.kernel_notes(answer.get("kernels", {}))
    notes += autotune.choice_notes(details.get("choices", {}))
    slow_side, fast_side = seconds.values()
    for name, cost in answer.get("one_off", {}).items():
        if cost:
            gain = slow_side - fast_side
            calls = f"pays after {cost / gain:.3g} calls" if gain > 0 else "never pays"
            notes.append(f"preparing {name} took {duration(cost)}: {calls}")


def with_limit(client: CaseClient, stored: StoredResult, timing: Timing) -> Timing:
    """Return `timing` with the share of the machine's limit, where its peaks are stored."""
    run, case = client.run, client.case
    rates = run.peaks(client.machine.product)
    if case.gpus > 1:
        rates = peaks.joined(rates, run.link_peaks(client.machine.with_count(case.gpus)))
    if rates is None or run.settings.aa:
        return timing
    limit = peaks.limit_of(Work(**timing.answer["work"]), case.pair.bound, rates)
    if limit is None:
        return timing
    product = client.machine.with_count(case.gpus if limit.name in peaks.LINKS else 1)
    path: Path = peaks.path_of(run.settings.baselines, product)
    cold = case.pair.l2 == "cold" and timing.clock == "graph"
    impossible = cold and peaks.implausible(limit, min(timing.pair_seconds))
    return replace(
        timing,
        share=peaks.share(limit, timing.pair_seconds[1]),
        limit=limit.name,
        limit_origin=stored.relative(path),
        shortest=limit.seconds if impossible else None,
    )
