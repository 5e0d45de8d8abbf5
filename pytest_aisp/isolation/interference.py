"""What a process does beside a side's work while that is timed: imports, compiling, page faults.

Read between blocks, never inside of a window, and only on clocks on which a side's Python runs in
its windows. A window in which a module was imported or something compiled is measured again: that
belongs to the top of the page or to warming, and who does it at every call is never timed.
"""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .protections import enabled

CLOCKS = ("host", "cpu", "queue")
"""Clocks on which a side's Python runs in its windows; a graph's replay runs none of it."""
FAULTS = "page_faults"
"""What a page says in ``owns=`` that means to read mapped files inside its windows."""
GRAPHS = ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass")
"""Inductor's counters of graphs; each one that it compiles or finds compiled is in one of them."""

_kernels = [0]
"""How many kernels Triton has compiled in this process, or loaded from its cache."""


@dataclass(frozen=True)
class Counts:
    """What was counted at one moment.

    Attributes:
        modules: a copy of `sys.modules`: who imports a module again has another one.
        counted: events by name, all of which only grow.
        swapped: KiB of this process that are swapped out; None where the system does not say.
    """

    modules: Mapping[str, Any]
    counted: Mapping[str, int]
    swapped: int | None


class InterferenceMonitor:
    """Count what goes on between `begin` and `look`, block after block.

    Args:
        owns: what the page varies itself; with ``page_faults`` they are counted, and no fault.
        allocations: how often memory was asked of the device so far.
    """

    def __init__(
        self, owns: Sequence[str] = (), allocations: Callable[[], int] = lambda: 0
    ) -> None:
        self._owns, self._allocations = owns, allocations
        self._totals: Counter[str] = Counter()
        self.begin()

    def begin(self) -> None:
        """Count from here on."""
        _listen()
        self._before = self._now()

    def look(self) -> str | None:
        """Add what went on since `begin`, and name what of it disturbs a block, or None."""
        now, before = self._now(), self._before
        imported = _imported(before.modules, now.modules)
        events = Counter({k: n - before.counted[k] for k, n in now.counted.items()})
        grown = max(0, (now.swapped or 0) - (before.swapped or 0))
        self._totals.update({"imports": len(imported), **events, "swapped_kib": grown})
        return ", ".join(self._causes(imported, events, grown)) or None

    def grew(self) -> bool:
        """Return whether anything was imported or compiled since `begin`, and begin anew."""
        before, self._before = self._before, self._now()
        same = all(before.counted[k] == self._before.counted[k] for k in _COMPILING)
        return bool(_imported(before.modules, self._before.modules)) or not same

    def counts(self) -> dict[str, int]:
        """Return what went on in all blocks together, the discarded one and dropped ones too."""
        unknown = self._before.swapped is None
        names = ("imports", *_EVENTS, *(() if unknown else ("swapped_kib",)))
        return {name: self._totals[name] for name in names}

    def _now(self) -> Counts:
        used = resource.getrusage(resource.RUSAGE_SELF)
        counted = {**_dynamo(), "kernels": _kernels[0], "allocations": self._allocations()}
        counted |= {"major_faults": used.ru_majflt, "minor_faults": used.ru_minflt}
        return Counts(dict(sys.modules), counted, swapped())

    def _causes(
        self, imported: Sequence[str], events: Mapping[str, int], grown: int
    ) -> Iterator[str]:
        if imported and enabled("no-imports"):
            more = f" and {len(imported) - 1} more" if len(imported) > 1 else ""
            yield f"{imported[0]}{more} imported inside a timed window (import at the page's top)"
        compiled = [_count(events[k], word) for k, word in _COMPILING.items() if events[k]]
        if compiled and enabled("no-compiling"):
            what = " and ".join(compiled)
            yield f"{what} compiled inside a timed window (only fresh processes time that)"
        if events["major_faults"] and FAULTS not in self._owns:
            yield f"{_count(events['major_faults'], 'page')} read from disk inside a timed window"
        if grown:
            yield f"{grown} KiB of this process swapped out inside a timed window"


_COMPILING = {
    "frames": "Dynamo frame",
    "graphs": "Inductor graph",
    "kernels": "Triton kernel",
}
_EVENTS = (*_COMPILING, "graph_breaks", "allocations", "major_faults", "minor_faults")


def swapped() -> int | None:
    """Return how many KiB of this process are swapped out, or None where nobody says."""
    try:
        with open("/proc/self/status") as lines:
            said = next((ln for ln in lines if ln.startswith("VmSwap:")), None)
    except OSError:
        return None
    return None if said is None else int(said.split()[1])


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + "s" * (number > 1)


def _imported(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [name for name, module in now.items() if before.get(name) is not module]


def _dynamo() -> dict[str, int]:
    """Return what Dynamo and Inductor have counted; nothing where they were never imported."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters: Mapping[str, Mapping[str, int]] = getattr(utils, "counters", {})
    inductor = counters.get("inductor", {})
    return {
        "frames": counters.get("frames", {}).get("total", 0),
        "graphs": sum(inductor.get(name, 0) for name in GRAPHS),
        "graph_breaks": sum(counters.get("graph_break", {}).values()),
    }


def _listen() -> None:
    """Have Triton tell of each kernel that it compiles, and whoever listened before as well."""
    triton = sys.modules.get("triton")
    compilation = getattr(getattr(triton, "knobs", None), "compilation", None)
    before = getattr(compilation, "listener", None)
    if compilation is None or getattr(before, "counts_for_aisp", False):
        return

    def told(**facts: Any) -> None:
        _kernels[0] += 1
        if before is not None:
            before(**facts)

    told.counts_for_aisp = True  # type: ignore[attr-defined]
    compilation.listener = told
