"""The load of the CPU: the time that other processes and the host take from this process."""

from __future__ import annotations

import glob
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from . import device
from .process_group import current_group

STOLEN = 0.05
"""A block is disturbed if other processes, or the host, took more than this share of its time."""
EXPLAINED = 0.5
"""Other processes caused a wait if their CPU seconds on all cores are at least this share of the
wait.
"""
WINDOW = 0.25
"""Seconds over which other processes' CPU time is counted. Linux counts in steps of 10 ms."""
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_waited_ns: dict[str, int] = {}
"""Nanoseconds that each thread has waited for a core, by its file, including ended threads."""


@dataclass(frozen=True)
class CpuReading:
    """The counters at one moment, in seconds.

    Attributes:
        waited: time that this process's threads have waited for a core.
        own: CPU time of this process, its children, and the other ranks on this machine.
        busy: CPU time of all processes on the usable cores, or None if the system hides it.
        stolen: time that the host has taken from the usable cores of this virtual machine.
    """

    at: float
    waited: float
    own: float
    busy: float | None
    stolen: float


def read_cpu() -> CpuReading:
    """Return the current counters. All ranks must call this together."""
    busy, stolen = _all_processes()
    own = current_group().sum_here(_own_seconds())
    return CpuReading(time.perf_counter(), _waited(), own, busy, stolen)


class CpuLoad:
    """Detect that other processes, or the host, keep this process from its cores.

    A process with more threads than cores makes its own threads wait. So a wait counts only if
    other processes used the cores at the same time.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start the period that the next `look` examines."""
        self._readings = deque([read_cpu()])

    def look(self) -> str | None:
        """Return a description of what took the cores since the last call, or None."""
        last, now = self._readings[-1], read_cpu()
        self._readings.append(now)
        while len(self._readings) > 2 and now.at - self._readings[1].at >= WINDOW:
            self._readings.popleft()
        first = self._readings[0]
        used = (now.busy or 0.0) - (first.busy or 0.0)
        stolen = now.stolen - first.stolen
        if stolen > STOLEN * (used + stolen) and stolen * TICKS > 1.5:
            return f"the host took {stolen / (used + stolen):.0%} of the CPU time (steal)"
        waited = now.waited - last.waited
        if waited <= STOLEN * (now.at - last.at) or not _others_compete(first, now):
            return None
        share = waited / max(waited + now.own - last.own, 1e-9)
        return f"this process waited for a core {share:.0%} of the time{load_text()}"


def _others_compete(first: CpuReading, now: CpuReading) -> bool:
    """Return whether other processes used enough CPU time to make this process wait."""
    if first.busy is None or now.busy is None:
        return True  # unknown, so nothing else explains the wait
    others = now.busy - first.busy - (now.own - first.own)
    cores = len(device.cores_here())
    if others > STOLEN * cores * (now.at - first.at):
        return True
    return others > EXPLAINED * (now.waited - first.waited)


def load_text() -> str:
    """Return the load average as text, such as ``; load 5.1 on 2 cores``, or an empty string."""
    try:
        return f"; load {os.getloadavg()[0]:.1f} on {len(device.cores_here())} cores"
    except OSError:
        return ""


def _waited() -> float:
    """Return the seconds that this process's threads have waited for a core, or 0 if unknown."""
    known = False
    for stat in glob.glob("/proc/self/task/*/schedstat"):
        with suppress(OSError, IndexError, ValueError), open(stat) as file:
            waited = int(file.read().split()[1])
            _waited_ns[stat] = max(_waited_ns.get(stat, 0), waited)
            known = True
    return sum(_waited_ns.values()) * 1e-9 if known else 0.0


def _all_processes() -> tuple[float | None, float]:
    """Return the CPU seconds of all processes on the usable cores, and the stolen seconds."""
    cores = {f"cpu{core}" for core in device.cores_here()}
    busy = stolen = 0
    try:
        with open("/proc/stat") as lines:
            for line in lines:
                name, *fields = line.split()
                if name in cores:
                    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, fields)
                    busy += user + nice + system + irq + softirq
                    stolen += steal
    except (OSError, ValueError):
        return None, 0.0
    return (busy / TICKS if busy else None), stolen / TICKS


def _own_seconds() -> float:
    """Return the CPU seconds of this process and of its children, both running and ended.

    A page's helper processes are part of the page's work, and do not disturb it.
    """
    ended = os.times()
    seconds = time.process_time() + ended.children_user + ended.children_system
    for child in descendants():
        with suppress(OSError, IndexError, ValueError), open(f"/proc/{child}/stat") as file:
            seconds += sum(map(int, file.read().rpartition(")")[2].split()[11:15])) / TICKS
    return seconds


def descendants() -> Iterator[int]:
    """Yield the ids of this process's children, and of their children, and so on."""
    todo = list(child_processes("self"))
    while todo:
        child = todo.pop()
        todo += child_processes(child)
        yield child


def child_processes(process: int | str) -> Iterator[int]:
    """Yield the ids of the children of `process`. Yield nothing if the system has no /proc."""
    for path in glob.glob(f"/proc/{process}/task/*/children"):
        with suppress(OSError), open(path) as file:
            yield from map(int, file.read().split())
