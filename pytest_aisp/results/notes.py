"""Notes and remarks of a row: graphs, memory, launch-bound sides, predicted times, slow baselines.

Remarks about a baseline that waits or hardly uses the machine never change the verdict. They only
tell the reader to check the baseline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .messages import Json
from .row import Row, amount, duration
from .verdict import NOT_COMPARED, NOT_KNOWN

LAUNCH_BOUND = 1.5
"""A side is launch-bound if a call without a CUDA graph takes at least this many times as long."""
MORE_TIMES, MORE_BYTES = 1.5, 64 << 20
"""Memory is traded for speed if the optimized side needs this many times the baseline's memory, and
also this many bytes more.
"""
WAITS, FEWER_TIMES = 0.5, 2.0
"""A baseline waits if its CPU share (CPU time over wall time) is below the first number, and the
optimized side's CPU share is more than the second number times the baseline's.
"""
UNUSED, USED = 0.01, 0.5
"""A baseline hardly uses the machine if it reaches less than the first share of the machine's
limit, while the optimized side reaches at least the second share.
"""


def unchanged_code(rows: Iterable[Row]) -> list[str]:
    """Return a line about the cases whose code is as it was stored, or nothing without any."""
    compared = [row for row in rows if row.stored is not None and not row.against]
    doubts = (NOT_COMPARED, NOT_KNOWN)
    count = sum(not any(d in text for text in row.remarks for d in doubts) for row in compared)
    if not count:
        return []
    return [
        f"unchanged code: {count} {'case' if count == 1 else 'cases'}; only the environment and the"
        " machine are compared with the stored results, and `detects` shows this wide margin"
    ]


def graph_notes(names: Sequence[str], details: Mapping[str, Json]) -> list[str]:
    """Return notes with each side's CUDA graph nodes per call, or the reason for no count."""
    if "no graph_nodes" in details:
        return [f"graph: nodes not counted: {details['no graph_nodes']}"]
    by_side = details.get("graph_nodes", {})
    return [
        f"{name}'s graph: {', '.join(_many(n, kind) for kind, n in by_side[role].items())} a call"
        for name, role in zip(names, by_side, strict=False)
    ]


def _many(number: float, kind: str) -> str:
    return f"{number:.3g} {kind}" + "s" * (number != 1)


def memory_note(peaks: Mapping[str, int]) -> tuple[str, bool]:
    """Return a note on both sides' memory, and whether memory is traded for speed.

    Args:
        peaks: peak bytes of ``baseline`` and ``optimized``, not including the inputs.
    """
    baseline, optimized = peaks["baseline"], peaks["optimized"]
    traded = optimized > MORE_TIMES * baseline and optimized - baseline > MORE_BYTES
    return f"memory: {amount(baseline)} / {amount(optimized)} beyond the inputs", traded


def launch_bound(
    clock: str, seconds: Mapping[str, float], as_called: Sequence[float]
) -> dict[str, float]:
    """Return each launch-bound side's time without a CUDA graph divided by the time with one.

    Args:
        clock: the clock whose times the verdict uses. On all clocks except ``graph``, the result is
            empty.
        seconds: each side's seconds per call on that clock.
        as_called: each side's seconds per call on the host's clock, in the same order.
    """
    if clock != "graph":
        return {}
    times = {
        name: called / alone
        for (name, alone), called in zip(seconds.items(), as_called, strict=True)
    }
    return {name: ratio for name, ratio in times.items() if ratio >= LAUNCH_BOUND}


def launch_bound_note(times: Mapping[str, float]) -> str:
    """Return a note on launch-bound sides."""
    said = ", ".join(f"{name} {ratio:.1f}x" for name, ratio in times.items())
    return f"launch-bound: without a graph, a call takes longer: {said}"


def predicted_note(
    predicted: Mapping[str, float], seconds: Mapping[str, float], unexplained: Sequence[str]
) -> str:
    """Return a message with the predicted times and speedup, and the sides that take longer."""
    baseline, optimized = predicted.values()
    text = f"predicted {duration(baseline)} / {duration(optimized)}: {baseline / optimized:.2g}x"
    longer = (f"{name} takes {seconds[name] / predicted[name]:.2f}x" for name in unexplained)
    return text + (f"; unexplained: {', '.join(longer)} the predicted time" if unexplained else "")


def cpu_note(names: Sequence[str], shares: Sequence[float]) -> tuple[str, bool]:
    """Return a note on the CPU time of both sides, and whether the baseline waits.

    Args:
        names: the baseline and the variant.
        shares: the process's CPU time divided by the wall time of the timed calls, by side.
    """
    baseline, optimized = shares
    if baseline < WAITS and FEWER_TIMES * baseline < optimized:
        return (
            f"{names[0]} computes for {baseline:.0%} of its time and waits for the rest, {names[1]}"
            f" computes for {min(optimized, 1.0):.0%}: look for a sleep, a lock, a file or another"
            " process",
            True,
        )
    return f"CPU time over wall time: {baseline:.2f} / {optimized:.2f}", False


def unused_limit(seconds: Mapping[str, float], share: float, limit: str) -> str | None:
    """Return a message if the baseline hardly uses the machine, else None.

    Args:
        seconds: seconds per call by side, with the baseline first.
        share: the share of `limit` that the optimized side reaches.
    """
    (baseline, slow), (optimized, fast) = seconds.items()
    reached = share * fast / slow
    if reached >= UNUSED or share < USED:
        return None
    return (
        f"{baseline} reaches {reached:.2g} of the {limit} limit, {optimized} {share:.2g}: look for"
        " a wider type, a loop in Python or a sleep in the baseline"
    )
