"""`aisp links diagnose`: find out why collectives are slow, from the arrival time of each rank.

A rank that arrives early at a collective waits for the last rank. So the collective seems slow on
the early rank, although the last rank is the cause. `diagnosis` distinguishes these causes:

- straggler: the same ranks arrive late in most calls, because of their own work.
- dependency: ranks arrive late because they waited for data from another rank.
- contention: no rank is late, but the transfer takes longer than it does alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..results.messages import DiagnoseTask
from ..results.row import duration
from ..util.cli_result import CliError, CliResult, columns
from ..util.device import Machine
from ..worker.collective_arrivals import CALLS, Call, DiagnoseResult, Meeting, SideArrivals
from .nccl import GLOO, ask_ranks, choose_ranks

CLOCK_FACTOR = 3
"""Delays that are shorter than this many times the clock error are ignored."""
WAIT_SHARE = 0.25
"""Waits that are shorter than this share of the transfer time are ignored."""
MOST_CALLS = 0.9
"""A rank counts as late if it arrives late in at least this share of the calls. Transfers count as
slow if they are slow in at least this share of the calls.

Of two equally fast ranks, the same one is later in 27 of 30 calls with a probability of 1e-5.
"""
SLOWDOWN = 1.5
"""Contention means that transfers take at least this many times as long as they do alone."""

Verdict = Literal["healthy", "straggler", "contention", "dependency", "unclear"]

ADVICE: Mapping[Verdict, str] = {
    "healthy": "",
    "straggler": "Compare what these ranks do before the collective with the others: their share of"
    " the work, their input, their core or GPU (aisp machine doctor)",
    "dependency": "Let the ranks wait less for each other: more and smaller microbatches, another"
    " schedule, or transfers that start earlier",
    "contention": "Look for what runs at the same time: other collectives, copies, or kernels that"
    " take the cores. Then measure the links: aisp links bandwidth, aisp links nccl",
    "unclear": "Repeat it while nothing else runs here: aisp machine doctor",
}


class RankFigures(Struct, frozen=True):
    """The times of one rank in the collectives of a call, as medians over the calls.

    Attributes:
        wait: seconds that the rank waits for the last rank.
        last: the share of collectives in which the rank arrives last.
        inside: seconds from the rank's arrivals to the ends of its collectives.
        blocked: seconds that the rank waits for data before its collectives.
    """

    wait: float
    last: float
    inside: float
    blocked: float


class Diagnosis(Struct, frozen=True):
    """The verdict on one side, with evidence and advice.

    Attributes:
        late: the ranks that cause the delay, or, for a dependency, all ranks in order of arrival.
    """

    verdict: Verdict
    evidence: str
    advice: str
    late: Sequence[int]
    ranks: Sequence[RankFigures]


def diagnosis(arrivals: SideArrivals, clock_error: float) -> Diagnosis:
    """Return the diagnosis of a side's collectives.

    The times of a call's collectives are added up. The diagnosis uses the median over all calls.

    Args:
        clock_error: the largest possible error, in seconds, between the clocks of two ranks.
    """
    calls, alone = arrivals.calls, arrivals.alone
    verdict, evidence, late = _cause(calls, alone, CLOCK_FACTOR * clock_error * len(calls[0]))
    ranks = [_figures(calls, rank) for rank in range(len(calls[0][0].arrived))]
    return Diagnosis(verdict, evidence, ADVICE[verdict], late, ranks)


def _cause(
    calls: Sequence[Call], alone: Sequence[float | None], resolution: float
) -> tuple[Verdict, str, Sequence[int]]:
    """Return the verdict, the evidence, and the late ranks."""
    wait = median(sum(m.spread for m in call) for call in calls)
    transfer = median(sum(m.transfer for m in call) for call in calls)
    least = max(resolution, WAIT_SHARE * transfer)
    lateness, own_lateness = _lateness(calls), _lateness(calls, own=True)
    late, own = _late_ranks(lateness, least), _late_ranks(own_lateness, least)
    excess, contention = _contention(calls, alone, resolution)
    lost = max([*late.values(), *own.values()], default=0.0)
    if contention and excess > lost:
        return "contention", contention, ()
    if late.keys() & own.keys() and max(own.values()) >= max(late.values()) / 2:
        by = duration(max(own.values()))
        words = f"{_names([*own])} late by {by}; the transfers take {duration(transfer)}"
        return "straggler", words, [*own]
    if late or own:
        blocked = [_figures(calls, rank).blocked for rank in range(len(lateness))]
        order = sorted(range(len(lateness)), key=lambda rank: (median(lateness[rank]), rank))
        most = max(order, key=lambda rank: blocked[rank])
        words = (
            f"rank {most} waits {duration(blocked[most])} for data before its collectives;"
            f" the ranks arrive in the order {' -> '.join(map(str, order))},"
            f" within {duration(wait)}"
        )
        return "dependency", words, order
    words = f"the ranks arrive within {duration(wait)}, and the transfers take {duration(transfer)}"
    if wait <= WAIT_SHARE * transfer:
        return "healthy", words, ()
    if wait <= resolution:
        return "unclear", f"{words}, but the clocks agree only within {duration(resolution)}", ()
    return "unclear", f"{words}, but no rank is late in {MOST_CALLS:.0%} of the calls", ()


def _lateness(calls: Sequence[Call], *, own: bool = False) -> list[list[float]]:
    """Return each rank's lateness in each call: its seconds after the first rank's arrival.

    Args:
        own: whether to subtract the time that a rank waited for data from other ranks.
    """
    rows = []
    for rank in range(len(calls[0][0].arrived)):
        rows.append([sum(_arrivals(m, own)[rank] for m in call) for call in calls])
    return rows


def _arrivals(meeting: Meeting, own: bool) -> list[float]:
    """Return the arrival of each rank in seconds after the first arrival."""
    pairs = zip(meeting.arrived, meeting.blocked, strict=True)
    times = [arrived - blocked * own for arrived, blocked in pairs]
    return [time - min(times) for time in times]


def _late_ranks(lateness: Sequence[Sequence[float]], least: float) -> dict[int, float]:
    """Return the late ranks, each with its median lateness in seconds.

    A rank is late if it arrives after the earliest rank in most calls. The rank's median lateness
    must also reach `least`, and half of the largest median lateness.
    """
    first = min(lateness, key=median)
    found = {}
    for rank, each in enumerate(lateness):
        after = [a - b for a, b in zip(each, first, strict=True)]
        often = sum(seconds > 0 for seconds in after) >= MOST_CALLS * len(after)
        if often and median(after) >= least:
            found[rank] = median(after)
    return {k: v for k, v in found.items() if v >= max(found.values()) / 2}


def _contention(
    calls: Sequence[Call], alone: Sequence[float | None], resolution: float
) -> tuple[float, str]:
    """Return the extra seconds that transfers take, compared with the same transfers alone.

    The second result describes a large difference, or is an empty string.
    """
    known = [k for k, seconds in enumerate(alone) if seconds is not None]
    expected = sum(alone[k] or 0.0 for k in known)
    if not expected:
        return 0.0, ""
    taken = [sum(call[k].transfer for k in known) for call in calls]
    excess, ratio = median(taken) - expected, median(taken) / expected
    often = sum(seconds > expected for seconds in taken) >= MOST_CALLS * len(taken)
    if ratio < SLOWDOWN or not often or excess < resolution:
        return excess, ""
    return excess, (
        f"once all ranks are there, the transfers take {duration(median(taken))}, {ratio:.1f}x the"
        f" {duration(expected)} that they take alone"
    )


def _figures(calls: Sequence[Call], rank: int) -> RankFigures:
    every = [m for call in calls for m in call]
    return RankFigures(
        median(sum(max(m.arrived) - m.arrived[rank] for m in call) for call in calls),
        sum(m.arrived[rank] == max(m.arrived) for m in every) / len(every),
        median(sum(m.ended[rank] - m.arrived[rank] for m in call) for call in calls),
        median(sum(m.blocked[rank] for m in call) for call in calls),
    )


def _names(ranks: Sequence[int]) -> str:
    words = " and ".join(map(str, ranks))
    return f"rank {words} is" if len(ranks) == 1 else f"ranks {words} are"


def record(
    machine: Machine,
    task: DiagnoseTask,
    *,
    ranks: int | None,
    timeout: float,
    progress: Callable[[str], None],
) -> tuple[DiagnoseResult, str]:
    """Start the ranks, record their arrivals, and stop them. Return the record and a title for it.

    If the task names no page, a loop of all-reduces is recorded on `ranks` ranks.

    Raises:
        CliError: the case has one rank, a rank fails, or the case makes no collective.
    """
    if not task.function:
        device, count = choose_ranks(machine, ranks)
    elif task.gpus < 2:
        how = "conditions=Conditions(gpus=2) gives it two"
        raise CliError(f"{task.case} has one rank, and a collective needs two or more; {how}")
    else:
        device, count = "cuda" if len(machine.gpus) >= task.gpus else "cpu", task.gpus
    reply = ask_ranks(machine, count, replace(task, device=device), timeout, progress)
    where = machine.name if device == "cuda" else GLOO
    return reply.read(DiagnoseResult), f"{count} ranks, {where}"


def diagnose_result(found: DiagnoseResult, title: str, *, as_json: bool = False) -> CliResult:
    """Return a table of the ranks and the verdict for each side.

    The exit code is 0 if all sides are healthy, and 1 if not.
    """
    sides = {name: diagnosis(side, found.clock_error) for name, side in found.sides.items()}
    code = 0 if all(side.verdict == "healthy" for side in sides.values()) else 1
    if as_json:
        document = {"clock_error": found.clock_error, "calls": CALLS, "sides": sides}
        return CliResult([json.dumps(msgspec.to_builtins(document), indent=1)], code)
    lines = [f"{title}; clocks agree within {duration(found.clock_error)}"]
    for name, side in sides.items():
        count = len(found.sides[name].calls[0])
        lines += ["", f"{name}: {CALLS} calls, collectives in each: {count}"]
        heads = ("rank", "waits for the last", "is the last", "in collectives", "waits for data")
        lines += columns([heads, *(_row(rank, each) for rank, each in enumerate(side.ranks))])
        lines += [f"{side.verdict}: {side.evidence}"]
        if None in found.sides[name].alone:
            lines.append("contention: not looked for in collectives whose time alone is unknown")
        lines += [side.advice] if side.advice else []
    return CliResult(lines, code)


def _row(rank: int, figures: RankFigures) -> tuple[str, ...]:
    times = (figures.wait, figures.inside, figures.blocked)
    wait, inside, blocked = map(duration, times)
    return str(rank), wait, f"{figures.last:.0%}", inside, blocked
