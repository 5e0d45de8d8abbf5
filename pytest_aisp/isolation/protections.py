"""The names and rules of all protections, and a function with which tests switch them off.

The cheating sides in `tests/exploits` prove two things: each protection catches its cheating sides,
and these sides pass if the protection is off. No option and no page can set `Task.without`, so only
tests can switch a protection off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

PROTECTIONS = {
    "returned": "a side returns its outputs",
    "inputs-unchanged": "a side changes nothing except its declared state, not even one bit",
    "no-alias": "an output is not a view of an input",
    "plain-tensors": "an output is a plain tensor with all elements written, never a lazy one",
    "plain-outputs": "reading the containers of outputs runs no code of the side",
    "form": "outputs have the number, shape, type and device of the reference and the baseline",
    "work": "the longest sum that the page declares is no longer than its inputs",
    "bound": "every element of every output lies within the derived error bound",
    "finite": "NaN and infinity are where the reference has them, and nowhere else",
    "ratio": "a variant that declares no lower precision is as exact as its baseline",
    "exact-probe": "small integers, where every sum is exact, give the exact result",
    "controls": "the page's tolerance refuses zeros, noise, permuted and stale answers",
    "fresh-values": "new values at the same address give a new answer",
    "fresh-memory": "memory from `empty` holds NaN, not an earlier answer",
    "steps": "a training step's state is compared after one, two and three steps",
    "timed-outputs": "the outputs of the last timed calls are compared, in every slot",
    "every-call": "a few more calls, each on new values, give the right answers",
    "new-values": "on the CPU's clock, every timed call gets values that no side has seen",
    "unseen-values": "before the last block the inputs get values that no side has seen",
    "poisoned-outputs": "outputs are overwritten with NaN between windows",
    "clocks-agree": "CUDA events, the host's clock and the GPU's own counter agree on the time",
    "kernels-agree": "in the profiler, kernels run no longer than the clocks measured",
    "no-late-work": "when the last call ends, no stream has unfinished work",
    "graph-nodes": "a side's graph computes something and does not call the CPU",
    "cold-l2": "one round of calls evicts everything that was in the L2 before",
    "repeats": "a side is as fast on new values as on repeated ones",
    "global-flags": "a side leaves the global settings of torch and the process as they were",
    "steady-settings": "a side does not change threads, oneDNN or cores inside its call, even for"
    " a moment",
    "malloc": "each window on the clock of the CPU starts with the same parameters of malloc",
    "threads": "no thread, child process or timer of a side runs after its call",
    "own-clock": "clocks, waits, comparisons, torch and the plugin are as before the page",
    "no-imports": "no module is imported inside a timed window in which a side's Python runs",
    "no-compiling": "nothing is compiled inside a timed window in which a side's Python runs",
    "untraced": "no tracer, profiler or debugger runs while something is timed",
}

_disabled: frozenset[str] = frozenset()


def enabled(name: str) -> bool:
    """Return whether the protection `name` is on. Raises KeyError for an unknown name."""
    PROTECTIONS[name]
    return name not in _disabled


@contextmanager
def without(names: Iterable[str]) -> Iterator[None]:
    """Switch the named protections off inside the `with` block."""
    global _disabled
    before, requested = _disabled, frozenset(names)
    if unknown := requested - PROTECTIONS.keys():
        raise KeyError(f"unknown protection: {', '.join(sorted(unknown))}")
    _disabled = requested
    try:
        yield
    finally:
        _disabled = before
