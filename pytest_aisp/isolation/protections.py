"""Every protection by name: what it refuses, and the switch with which the tests prove it.

A protection that cannot fail is worth nothing, so each is shown twice in `tests/exploits`: a lie is
caught by it, and the same lie passes with it switched off. Nothing but those tests switches one
off: neither option nor page can reach `Task.without`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

PROTECTIONS = {
    "returned": "a side returns its outputs",
    "inputs-unchanged": "a side changes nothing but its declared state, bit for bit",
    "no-alias": "an output is no view of an input",
    "plain-tensors": "an output is a plain tensor whose elements are all written: no lazy one",
    "form": "number, shape, type and device of outputs are the reference's and the baseline's",
    "work": "the page's longest sum is no longer than its inputs: it widens the bound",
    "bound": "every element of every output lies within the derived error bound",
    "finite": "NaN and infinity are where the reference has them, and nowhere else",
    "ratio": "an undeclared variant is as exact as its baseline",
    "exact-probe": "small integers, where every sum is exact, give the exact result",
    "controls": "the page's tolerance refuses zeros, noise, permuted and stale answers",
    "fresh-values": "other values at the same address give another answer",
    "fresh-memory": "memory handed out by `empty` holds NaN, not an earlier answer",
    "steps": "a training step's state is compared after one, two and three steps",
    "timed-outputs": "the outputs of the last timed calls are compared, every slot's",
    "every-call": "each of a few further calls, on other values each time, gives the right answer",
    "unseen-values": "before the last block the inputs take values that no side has seen",
    "poisoned-outputs": "outputs are overwritten with NaN between windows",
    "clocks-agree": "events, the host between full waits and the GPU's own counter tell one time",
    "kernels-agree": "the profiler sees kernels at work for no longer than the clocks say",
    "no-late-work": "when the last call ends nothing is under way on another stream",
    "graph-nodes": "a side's graph computes, and calls nothing on the CPU",
    "cold-l2": "after one round of calls the L2 holds nothing of what it held before",
    "repeats": "a side is as fast on values that it has never seen as when they come again",
    "global-flags": "a side leaves torch's and the process's global switches as they were",
    "threads": "no thread, child process or timer of a side is at work after its call",
    "own-clock": "clocks, waits, comparisons and the plugin itself are those from before the page",
    "no-imports": "no module is imported inside a timed window in which a side's Python runs",
    "no-compiling": "nothing is compiled inside a timed window in which a side's Python runs",
    "untraced": "no tracer, profiler or debugger runs along with what is timed",
}

_off: frozenset[str] = frozenset()


def enabled(name: str) -> bool:
    """Return whether the protection `name` holds. Raises KeyError for a name without a meaning."""
    PROTECTIONS[name]
    return name not in _off


@contextmanager
def without(names: Iterable[str]) -> Iterator[None]:
    """Switch protections off inside the block, to see what passes then."""
    global _off
    before, _off = _off, frozenset(names)
    unknown = _off - PROTECTIONS.keys()
    if unknown:
        _off = before
        raise KeyError(f"unknown protection: {', '.join(sorted(unknown))}")
    try:
        yield
    finally:
        _off = before
