"""What may still be at work when a side has returned: threads, child processes, timers."""

from __future__ import annotations

import glob
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from ..page.sources import libraries

NAP, RESTS = 1e-3, 4
"""A thread in a library's code is idle once it has slept through so many of our naps."""
WORK_NS = 4_000_000
"""It is at work once it has used so much CPU time instead: winding down takes less."""
PATIENCE = 2.0
"""Seconds after which a thread that never rests is at work, even if it hardly gets a core."""

_TIMERS = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")
_SERVANTS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@dataclass(frozen=True)
class BackgroundWork:
    """What ran at a moment: threads, child processes, timers of signals."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    timers: frozenset[str]

    @classmethod
    def now(cls) -> BackgroundWork:
        """Return what runs now."""
        threads = frozenset(threading.enumerate())
        return cls(threads, frozenset(_children()), frozenset(_timers()))

    def left(self) -> str | None:
        """Return what has been at work since, in words: ``a thread at work: name``; or None."""
        for thread in threading.enumerate():
            if thread not in self.threads and _at_work(thread):
                return f"a thread at work after its call: {thread.name}"
        for pid in _children():
            if pid not in self.children and not _ended(pid) and not _of_a_library(pid):
                return f"a process at work after its call: {pid}"
        for timer in _timers():
            if timer not in self.timers:
                return f"a timer running after its call: signal.{timer}"
        return None


def _at_work(thread: threading.Thread) -> bool:
    """Return whether `thread` runs a page's code, or is busy in a library's.

    Idle pools have torch's and Python's code alone on their stacks, and use no CPU time. CPU time
    decides, because on a busy machine an idle thread may wait for a core to go to sleep on, and
    a busy one may sleep for a moment until it gets Python's lock.
    """
    started = _cpu_ns(thread.native_id)
    deadline = time.monotonic() + PATIENCE
    rests = 0
    while time.monotonic() < deadline:
        if _in_a_page(sys._current_frames().get(thread.ident or 0)):
            return True
        before = _cpu_ns(thread.native_id)
        time.sleep(NAP)  # gives up Python's lock, so that a thread that waits for it goes on
        used = _cpu_ns(thread.native_id)
        if used - started > WORK_NS:
            return True
        rests += used == before and _state(f"/proc/self/task/{thread.native_id}") != "R"
        if rests == RESTS:
            return False
    return True


def _cpu_ns(thread: int | None) -> int:
    """Return the CPU time of a thread by its native id, 0 where Linux does not say."""
    if thread is None:
        return 0
    try:
        return time.clock_gettime_ns(~thread << 3 | 6)  # CPUCLOCK_PERTHREAD | CPUCLOCK_SCHED
    except OSError:  # it has ended
        return 0


def _in_a_page(frame: types.FrameType | None) -> bool:
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(libraries()) and not file.startswith("<"):
            return True
        frame = frame.f_back
    return False


def _children() -> Iterator[int]:
    """Yield the processes that this one has started; none where Linux does not say."""
    for path in glob.glob("/proc/self/task/*/children"):
        with suppress(OSError), open(path) as file:
            yield from map(int, file.read().split())


def _of_a_library(pid: int) -> bool:
    """Return whether a library started it for itself, as Inductor does its compile workers."""
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            arguments = file.read().split("\0")[1:]
    except OSError:
        return True
    return any(a.startswith(libraries()) or any(s in a for s in _SERVANTS) for a in arguments)


def _ended(pid: int) -> bool:
    return _state(f"/proc/{pid}") in ("", "X", "Z")


def _state(folder: str) -> str:
    """Return the letter of a process's or thread's state, empty where there is none."""
    try:
        with open(f"{folder}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _timers() -> Iterator[str]:
    for name in _TIMERS:
        if hasattr(signal, name) and signal.getitimer(getattr(signal, name))[0]:
            yield name
