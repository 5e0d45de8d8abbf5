"""A case's samples as a report embeds them: windows in the order in which they ran, cut to size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

BUDGET, LEAST, MOST = 24_000, 6, 40
"""Blocks of four windows that a whole report holds, and the least and most of one process."""
PROCESSES = 8
"""Processes of a case that are shown, the first ones."""
FACTS: tuple[str, ...] = ("sm_mhz", "watts", "celsius", "as_called", "gpu_only", "peak_bytes")
FACTS += ("graph_nodes",)


def blocks_for(cases: int) -> int:
    """Return how many blocks of each process a report of `cases` cases may hold."""
    return max(LEAST, min(MOST, BUDGET // max(cases, 1)))


def embedded(timings: Sequence[Mapping[str, Any]], most: int) -> list[dict[str, Any]]:
    """Return what to embed of each process's windows, `most` blocks of each.

    Of more blocks those are kept that hold the shortest and the longest window of either side, and
    others at even distances, whole, so that both sides keep their neighbours in time.
    """
    shown = timings[:PROCESSES]
    found = [_process(t, most) for t in shown if _pairs(t)]
    return [{**one, "of": len(timings)} for one in found]


def _process(timing: Mapping[str, Any], most: int) -> dict[str, Any]:
    blocks = _blocks(timing)
    kept = _kept(blocks, most)
    details = timing.get("details")
    details = details if isinstance(details, Mapping) else {}
    facts = {k: details[k] for k in FACTS if details.get(k) is not None}
    windows = [w for i in kept for w in blocks[i]]
    return {
        "sides": "".join(side for side, _ in windows),
        "us": [float(f"{seconds * 1e6:.5g}") for _, seconds in windows],
        "blocks": len(blocks),
        "kept": kept if len(kept) < len(blocks) else None,
        "laps": _laps(timing, len(blocks)),
        "dropped": _dropped(timing),
        "looks": details.get("looks") or [],
        "facts": facts,
    }


def _pairs(timing: Mapping[str, Any]) -> bool:
    """Return whether there are windows of both sides, and numbers in them."""
    sides = [timing.get("baseline"), timing.get("optimized")]
    return all(isinstance(s, list) and s and all(_is_time(v) for v in s) for s in sides)


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _blocks(timing: Mapping[str, Any]) -> list[list[tuple[str, float]]]:
    """Return the windows by block, in order: ``b`` or ``o``, and seconds a call."""
    baseline, optimized = timing["baseline"], timing["optimized"]
    orders = timing.get("orders") or []
    if not 2 * len(orders) == len(baseline) == len(optimized):  # an order that nobody knows
        return [[("b", b), ("o", o)] for b, o in zip(baseline, optimized, strict=False)]
    blocks = []
    for i, order in enumerate(orders):
        left = {"A": list(baseline[2 * i : 2 * i + 2]), "B": list(optimized[2 * i : 2 * i + 2])}
        blocks.append([("b" if s == "A" else "o", left[s].pop(0)) for s in order if left.get(s)])
    return blocks


def _kept(blocks: Sequence[Sequence[tuple[str, float]]], most: int) -> list[int]:
    """Return the indices of the blocks to keep, in order."""
    count = len(blocks)
    if count <= most:
        return list(range(count))
    kept = set()
    for side in "bo":
        order = sorted((s, i) for i, block in enumerate(blocks) for w, s in block if w == side)
        kept |= {order[0][1], order[-1][1]}
    free = most - len(kept)
    kept |= {round(i * (count - 1) / max(free - 1, 1)) for i in range(free)}
    return sorted(kept)


def _laps(timing: Mapping[str, Any], blocks: int) -> list[int]:
    """Return before which blocks both sides were built anew: laps are of equal length."""
    laps = len(timing.get("laps") or [])
    if laps < 2 or blocks % laps:
        return []
    return list(accumulate([blocks // laps] * (laps - 1)))


def _dropped(timing: Mapping[str, Any]) -> list[list[Any]]:
    """Return cause and place, the number of blocks before it, of each block measured again."""
    causes = timing.get("dropped") or []
    places = timing.get("dropped_at") or []
    known = len(places) == len(causes)
    return [[cause, places[i] if known else None] for i, cause in enumerate(causes)]
