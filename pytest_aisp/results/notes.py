"""Notes and remarks of a row: graphs, memory, launch-bound sides, predicted times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .messages import Json
from .row import amount, duration

LAUNCH_BOUND = 1.5
"""A side is launch-bound if its calls take this many times as long without a graph."""
MORE_TIMES, MORE_BYTES = 1.5, 64 << 20
"""Memory is traded for speed if the optimized side needs more by this factor and by these bytes."""


def graph_notes(names: Sequence[str], details: Mapping[str, Json]) -> list[str]:
    """Return notes that give each side's graph nodes per call, or say why there are none."""
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
    """Return the text about the memory of both sides, and whether memory is traded for speed.

    Args:
        peaks: peak bytes of ``baseline`` and ``optimized``, without their inputs.
    """
    baseline, optimized = peaks["baseline"], peaks["optimized"]
    traded = optimized > MORE_TIMES * baseline and optimized - baseline > MORE_BYTES
    return f"memory: {amount(baseline)} / {amount(optimized)} beyond the inputs", traded


def launch_bound(
    clock: str, seconds: Mapping[str, float], as_called: Sequence[float]
) -> dict[str, float]:
    """Return for each launch-bound side how many times longer a call takes without a graph.

    Args:
        clock: the clock whose times the verdict uses. The result is empty unless it is ``graph``.
        seconds: seconds per call by side on that clock.
        as_called: seconds per call on the host's clock, for the sides in the same order.
    """
    if clock != "graph":
        return {}
    times = {
        name: called / alone
        for (name, alone), called in zip(seconds.items(), as_called, strict=True)
    }
    return {name: ratio for name, ratio in times.items() if ratio >= LAUNCH_BOUND}


def launch_bound_note(times: Mapping[str, float]) -> str:
    """Return the text about launch-bound sides."""
    said = ", ".join(f"{name} {ratio:.1f}x" for name, ratio in times.items())
    return f"as called {said} longer: launch-bound without a graph"


def predicted_note(
    predicted: Mapping[str, float], seconds: Mapping[str, float], unexplained: Sequence[str]
) -> str:
    """Return the text about the predicted times and speedup, and about unexplained sides."""
    baseline, optimized = predicted.values()
    text = f"predicted {duration(baseline)} / {duration(optimized)}: {baseline / optimized:.2g}x"
    longer = (f"{name} takes {seconds[name] / predicted[name]:.2f}x" for name in unexplained)
    return text + (f"; unexplained: {', '.join(longer)} the predicted time" if unexplained else "")
