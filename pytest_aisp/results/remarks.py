"""What a row says beside its numbers: what graphs contain, memory, and who waits for launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LAUNCH_BOUND = 1.5
"""A side is launch-bound whose calls take this many times as long without a graph."""
MORE_TIMES, MORE_BYTES = 1.5, 64 << 20
"""Memory is traded for speed where the optimized side needs this many times, and this many bytes,
more than the baseline."""


def graphs(names: Sequence[str], details: Mapping[str, Any]) -> list[str]:
    """Return what the graphs of both sides contain a call, or why nobody counted."""
    if "no graph_nodes" in details:
        return [f"graph: nodes not counted: {details['no graph_nodes']}"]
    by_side = details.get("graph_nodes", {})
    return [
        f"{name}'s graph: {', '.join(_many(n, kind) for kind, n in by_side[role].items())} a call"
        for name, role in zip(names, by_side, strict=False)
    ]


def _many(number: float, kind: str) -> str:
    return f"{number:.3g} {kind}" + "s" * (number != 1)


def memory(peaks: Mapping[str, int]) -> tuple[str, bool]:
    """Return the memory of both sides in words, and whether it is traded for speed.

    Args:
        peaks: bytes beyond the inputs, of ``baseline`` and ``optimized``.
    """
    baseline, optimized = peaks["baseline"], peaks["optimized"]
    traded = optimized > MORE_TIMES * baseline and optimized - baseline > MORE_BYTES
    return f"memory: {amount(baseline)} / {amount(optimized)} beyond the inputs", traded


def amount(count: float) -> str:
    """Return ``1.2 GiB`` for a number of bytes."""
    if count < 1024:
        return f"{count:.0f} B"
    power = 3 if count >= 1 << 30 else 2 if count >= 1 << 20 else 1
    scaled = count / 1024**power
    return f"{scaled:.{0 if scaled >= 100 else 1}f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def launch_bound(
    clock: str, seconds: Mapping[str, float], as_called: Sequence[float]
) -> dict[str, float]:
    """Return by side how many times longer a call takes without a graph, where that is much.

    Args:
        clock: the clock that judges; only on ``graph`` is there anything to say.
        seconds: per call by side on that clock; `as_called`: on the host's, in the same order.
    """
    if clock != "graph":
        return {}
    times = {
        name: called / alone
        for (name, alone), called in zip(seconds.items(), as_called, strict=True)
    }
    return {name: ratio for name, ratio in times.items() if ratio >= LAUNCH_BOUND}


def launch_bound_words(times: Mapping[str, float]) -> str:
    """Return what to say of launch-bound sides."""
    said = ", ".join(f"{name} {ratio:.1f}x" for name, ratio in times.items())
    return f"as called {said} longer: launch-bound without a graph"
