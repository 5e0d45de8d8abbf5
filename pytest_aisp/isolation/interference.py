"""Detect interference with a measurement: leftover threads and processes, imports, page faults.

`Cause` describes what disturbed a block, and whether the machine or the side caused it.

`BackgroundWork` finds threads, processes and timers that still run after a side has returned.

`InterferenceMonitor` reads counters between blocks, never inside a window. The monitor is used only
on clocks whose windows run a side's Python code. A block in which a module was imported or code was
compiled is measured again. Imports belong at the top of the page, and compilation belongs in the
warmup.
"""

from __future__ import annotations

import resource
import signal
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..page.sources import libraries
from ..util.cpu_load import child_processes
from ..util.process_group import current_group
from .protections import enabled

POLL_SECONDS, IDLE_POLLS = 1e-3, 4
"""Seconds between polls of a thread. The thread is idle once `IDLE_POLLS` polls find it asleep."""
BUSY_NS = 4_000_000
"""A thread that uses more CPU time than this is busy. A thread that shuts down uses less."""
POLL_TIMEOUT = 2.0
"""A thread that is not found idle within this many seconds counts as busy."""
_TIMERS = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")
_PYTHON_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")

CLOCKS = ("host", "cpu", "queue")
"""The clocks whose windows run a side's Python code. A graph replay runs no Python code."""
FAULTS = "page_faults"
"""The word in ``owns=`` that allows windows to read mapped files or managed memory."""
_GRAPH_COUNTERS = ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass")
"""Inductor increments one of these counters for each graph that it compiles or loads."""
_COMPILING = {"frames": "Dynamo frame", "graphs": "Inductor graph", "kernels": "Triton kernel"}
_EVENTS = (*_COMPILING, "graph_breaks", "allocations", "major_faults", "minor_faults")
_triton_kernels = [0]
"""Number of kernels that Triton has compiled or loaded from its cache in this process."""


class Disturbed(RuntimeError):
    """The machine disturbed a measurement. The message names the cause and its size."""


class Cause(NamedTuple):
    """The cause of a disturbed block: the machine, or the side itself, such as its imports."""

    text: str
    machine: bool = True


def agreed_cause(side: Cause | None, machine: str | None) -> Cause | None:
    """Return one cause for all ranks. A side's cause takes priority over the machine's."""
    group = current_group()
    own = side.text if side is not None and not side.machine else None
    text = group.first_message(own)
    if text is not None:
        return Cause(text, machine=False)
    text = group.first_message(machine or (side.text if side is not None else None))
    return None if text is None else Cause(text)


@dataclass(frozen=True)
class BackgroundWork:
    """The threads, child processes and signal timers that exist at one moment.

    Attributes:
        threads: every thread, with its CPU time in nanoseconds.
    """

    threads: Mapping[threading.Thread, int]
    children: frozenset[int]
    timers: frozenset[str]

    @classmethod
    def now(cls) -> BackgroundWork:
        """Return the threads, child processes and signal timers that exist now."""
        threads = {thread: _cpu_ns(thread.native_id) for thread in threading.enumerate()}
        return cls(threads, frozenset(child_processes("self")), frozenset(_timers()))

    def left(self) -> str | None:
        """Return a description of work that was started after `now` and still runs, or None."""
        new = [thread for thread in threading.enumerate() if thread not in self.threads]
        for thread in [*new, *self.used_cpu()]:
            if _is_busy(thread, idle_in_page=thread in self.threads):
                return f"a thread still running after its call: {thread.name}"
        for pid in child_processes("self"):
            if pid not in self.children and not _ended(pid) and not _of_a_library(pid):
                return f"a process still running after its call: {pid}"
        for timer in _timers():
            if timer not in self.timers:
                return f"a timer running after its call: signal.{timer}"
        return None

    def used_cpu(self) -> list[threading.Thread]:
        """Return the older threads, except this one, that have used CPU time since `now`."""
        old = ((thread, used) for thread, used in self.threads.items() if thread.is_alive())
        busy = [thread for thread, used in old if _cpu_ns(thread.native_id) - used > BUSY_NS]
        return [thread for thread in busy if thread is not threading.current_thread()]


def _is_busy(thread: threading.Thread, *, idle_in_page: bool = False) -> bool:
    """Return whether `thread` runs a page's code or uses CPU time in a library's code.

    Threads of idle pools (torch, Python) have only library code on their stacks and use no CPU
    time. The scheduler's state alone is misleading on a busy machine: an idle thread may wait for a
    core before it can sleep, and a busy thread may sleep until it gets Python's lock.

    Args:
        idle_in_page: whether a thread that waits in a page's code counts as idle.
    """
    started = _cpu_ns(thread.native_id)
    deadline = time.monotonic() + POLL_TIMEOUT
    idle = 0
    while time.monotonic() < deadline:
        if not idle_in_page and _in_a_page(sys._current_frames().get(thread.ident or 0)):
            return True
        before = _cpu_ns(thread.native_id)
        time.sleep(POLL_SECONDS)  # releases Python's lock, so that a waiting thread can continue
        used = _cpu_ns(thread.native_id)
        if used - started > BUSY_NS:
            return True
        idle += used == before and _state(f"/proc/self/task/{thread.native_id}") != "R"
        if idle == IDLE_POLLS:
            return False
    return True


def _cpu_ns(thread: int | None) -> int:
    """Return the CPU time of the thread with this native id, or 0 if it has ended."""
    if thread is None:
        return 0
    try:
        return time.clock_gettime_ns(~thread << 3 | 6)  # CPUCLOCK_PERTHREAD | CPUCLOCK_SCHED
    except OSError:
        return 0


def _in_a_page(frame: types.FrameType | None) -> bool:
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(libraries()) and not file.startswith("<"):
            return True
        frame = frame.f_back
    return False


def _of_a_library(pid: int) -> bool:
    """Return whether a library started the process, such as a compiler process of Inductor."""
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            arguments = file.read().split("\0")[1:]
    except OSError:
        return True
    return any(
        argument.startswith(libraries()) or any(name in argument for name in _PYTHON_HELPERS)
        for argument in arguments
    )


def _ended(pid: int) -> bool:
    return _state(f"/proc/{pid}") in ("", "X", "Z")


def _state(folder: str) -> str:
    """Return the state letter of a process or thread from Linux, or "" if it has ended."""
    try:
        with open(f"{folder}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _timers() -> Iterator[str]:
    for name in _TIMERS:
        if hasattr(signal, name) and signal.getitimer(getattr(signal, name))[0]:
            yield name


@dataclass(frozen=True)
class Counts:
    """The counters at one moment.

    Attributes:
        modules: a copy of `sys.modules`. The copy reveals reimports, which create new objects.
        events: number of events up to this moment, by name.
        swapped: KiB of this process that are swapped out, or None if the system does not report it.
    """

    modules: Mapping[str, object]
    events: Mapping[str, int]
    swapped: int | None


class InterferenceMonitor:
    """Count events between `begin` and `look`, block after block.

    Args:
        owns: the settings that the page changes on purpose. With ``page_faults``, page faults are
            counted but allowed.
        allocations: a function that returns the device's number of memory allocations.
    """

    def __init__(
        self, owns: Sequence[str] = (), allocations: Callable[[], int] = lambda: 0
    ) -> None:
        self._owns, self._allocations = owns, allocations
        self._totals: Counter[str] = Counter()
        self.begin()

    def begin(self) -> None:
        """Start counting."""
        _listen_to_triton()
        self._before = self._now()

    def look(self) -> Cause | None:
        """Count the events since `begin`. Return the cause if they disturb the block, or None."""
        now, before = self._now(), self._before
        imported = _imported(before.modules, now.modules)
        events = Counter({name: n - before.events[name] for name, n in now.events.items()})
        swapped = max(0, (now.swapped or 0) - (before.swapped or 0))
        self._totals.update({"imports": len(imported), **events, "swapped_kib": swapped})
        own = list(self._own_causes(imported, events))
        faults = 0 if FAULTS in self._owns else events["major_faults"]
        text = ", ".join([*own, *_paging(faults, swapped)])
        return Cause(text, machine=not own) if text else None

    def grew(self) -> bool:
        """Return whether anything was imported or compiled since `begin`, and restart the count."""
        before, self._before = self._before, self._now()
        compiled = any(before.events[name] != self._before.events[name] for name in _COMPILING)
        return compiled or bool(_imported(before.modules, self._before.modules))

    def counts(self) -> dict[str, int]:
        """Return the number of events in all blocks, including dropped blocks."""
        unknown = self._before.swapped is None
        names = ("imports", *_EVENTS, *(() if unknown else ("swapped_kib",)))
        return {name: self._totals[name] for name in names}

    def _now(self) -> Counts:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        events = {**_dynamo(), "kernels": _triton_kernels[0], "allocations": self._allocations()}
        events |= {"major_faults": usage.ru_majflt, "minor_faults": usage.ru_minflt}
        return Counts(dict(sys.modules), events, swapped_kib())

    def _own_causes(self, imported: Sequence[str], events: Mapping[str, int]) -> Iterator[str]:
        if imported and enabled("no-imports"):
            more = f" and {len(imported) - 1} more" if len(imported) > 1 else ""
            yield f"{imported[0]}{more} imported inside a timed window (import at the page's top)"
        compiled = [_count(events[k], word) for k, word in _COMPILING.items() if events[k]]
        if compiled and enabled("no-compiling"):
            names = " and ".join(compiled)
            yield f"{names} compiled inside a timed window (only fresh processes time that)"


def _paging(faults: int, swapped: int) -> Iterator[str]:
    if faults:
        yield (
            f"{_count(faults, 'page')} read from disk inside a timed window (for mapped files and"
            " managed memory: Conditions(owns=['page_faults']))"
        )
    if swapped:
        yield f"{swapped} KiB of this process swapped out inside a timed window"


def swapped_kib() -> int | None:
    """Return the KiB of this process that are swapped out, or None if the number is unknown."""
    try:
        with open("/proc/self/status") as lines:
            line = next((line for line in lines if line.startswith("VmSwap:")), None)
    except OSError:
        return None
    return None if line is None else int(line.split()[1])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number > 1)


def _imported(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    return [name for name, module in now.items() if before.get(name) is not module]


def _dynamo() -> dict[str, int]:
    """Return the counters of Dynamo and Inductor, which are 0 if Dynamo was never imported."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters: Mapping[str, Mapping[str, int]] = getattr(utils, "counters", {})
    inductor = counters.get("inductor", {})
    return {
        "frames": counters.get("frames", {}).get("total", 0),
        "graphs": sum(inductor.get(name, 0) for name in _GRAPH_COUNTERS),
        "graph_breaks": sum(counters.get("graph_break", {}).values()),
    }


def _listen_to_triton() -> None:
    """Count each kernel that Triton compiles. A listener that was already set is still called."""
    triton = sys.modules.get("triton")
    compilation = getattr(getattr(triton, "knobs", None), "compilation", None)
    before = getattr(compilation, "listener", None)
    if compilation is None or getattr(before, "counts_for_aisp", False):
        return

    def count(**facts: object) -> None:
        _triton_kernels[0] += 1
        if before is not None:
            before(**facts)

    count.counts_for_aisp = True  # type: ignore[attr-defined]
    compilation.listener = count
