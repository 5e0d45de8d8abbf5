"""Time two sides on a CUDA GPU, on the best clock that both sides can use.

The best clock is the replay of a graph (`GraphWindow`), and the second best is queued calls
(`QueueWindow`). Pages whose ordinary calls are timed use the host's clock (`HostWindow`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from ..checking.inputs import BoundSide, InputPool
from ..isolation import interference
from ..isolation.interference import Cause, agreed_cause
from ..page.pair import ROLES, PageError, SideError
from ..util.cpu_load import CpuLoad
from ..util.device_state import Telemetry
from ..util.process_group import current_group
from . import l2, schedule
from .cpu_timer import HostWindow, cpu_shares
from .cross_check import STRETCH, Clocks, KernelProfile, contradiction, profile_kernels, read_clocks
from .cuda_graph import GraphWindow, Uncapturable, check_nodes, on_all_ranks
from .memory import peak_bytes
from .schedule import Budget, calls_a_round, calls_for, calls_to_plant, extra_calls

LINKS = ("pcie", "nvlink")
"""Pages with these bounds transfer data over a link, so the data need not be cold in the L2.
"""
WINDOW = {"graph": 1e-3, "queue": 1e-3, "host": 5e-3}
"""Shortest length of a window in seconds, by clock."""
SPIN_CYCLES = 2_000_000
"""Initial length of the blocking kernel in GPU cycles, about 1 ms."""
LONG_CALL = 1e-3
"""The time of calls longer than this many seconds is estimated from a single window."""
SIZINGS = 3
"""The number of calls in a window is corrected at most this many times."""
FASTEST = 5e-7
"""A call is assumed to take at least this many seconds.

An empty graph node takes twice as long, so a side that seems faster than this does no work. Without
this limit, a window of an empty side would have a million calls.
"""
NEAR = 0.25
"""The number of calls in a window may be off by at most this share."""
THREADS = "the page owns threads, which a capture would disturb"


class Unblockable(PageError):
    """A side waits for the GPU, so its calls cannot be queued behind a blocking kernel."""


class QueueWindow:
    """Time K calls of one side between two events.

    The calls are queued behind a blocking kernel, so that the GPU never waits for Python. `before`
    runs first.
    """

    repeats = 1
    before: Callable[[], object] | None = None

    def __init__(self, side: BoundSide, counted: int, extra: int = 0) -> None:
        import torch

        self.side, self.counted, self.calls = side, counted, counted + extra
        self._extra, self._cycles = extra, SPIN_CYCLES
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self) -> float:
        import torch

        for _ in range(6):
            self.side.restore()
            if self.before is not None:
                self.before()
            torch.cuda._sleep(self._cycles)
            self._start.record()
            self.side.cycle(self.counted, self._extra)
            self._end.record()
            late = self._start.query()
            self._end.synchronize()
            if not late:
                return float(self._start.elapsed_time(self._end)) * 1e-3 / self.counted
            self._cycles *= 2
        raise Unblockable(f"{self.side.name} waits for the GPU or launches too much to queue")

    def clocks(self, seconds: float) -> Clocks:
        """Time one window with each clock. The window may be short, because it must fit the queue.

        A side may start work on another stream. This work can finish while the kernel blocks the
        main stream, and then it does not look late. So a second reading has no blocking kernel.
        """
        import torch

        def read(before: Callable[[], None] | None) -> Clocks:
            self.side.restore()
            work = functools.partial(self.side.cycle, self.counted, self._extra)
            return read_clocks(work, self._start, self._end, before)

        blocked, free = read(lambda: torch.cuda._sleep(self._cycles)), read(None)
        return replace(blocked, late=max(blocked.late, free.late), queued=True)


CudaWindow: TypeAlias = GraphWindow | QueueWindow | HostWindow
WINDOWS: dict[str, type[CudaWindow]]
WINDOWS = {"graph": GraphWindow, "queue": QueueWindow, "host": HostWindow}


class CudaPairTimer:
    """Time two sides on one GPU, on the best clock that both can use. Windows repeat values.

    Args:
        order: the order in which the two sides are built.
        known: the clock and the counted calls of an earlier timer of this pair, to be reused.
        planted: the slowdown to plant in each side.
    """

    def __init__(
        self,
        pool: InputPool,
        sides: tuple[BoundSide, BoundSide],
        budget: Budget,
        order: tuple[int, int] = (0, 1),
        known: tuple[str, Sequence[int]] | None = None,
        planted: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        import torch

        self.pool, self.sides, self.budget, self._order = pool, sides, budget, order
        self.unseen = None
        self._planted = planted
        self.telemetry = Telemetry(torch.cuda.current_device())
        self._l2_bytes = torch.cuda.get_device_properties().L2_cache_size
        self.notes: dict[str, object] = {}
        self._monitor = interference.InterferenceMonitor(pool.pair.owns, _allocations)
        self.notes["warmup"] = self._warm_up(1.0 if known is None else 0.0)
        if known is None:
            self.clock, self.windows = self._choose_clock()
        else:
            self.clock, self.windows = known[0], self._build(known[0], known[1])
        self._runs_python = self.clock in interference.CLOCKS
        self._load = CpuLoad()

    def _warm_up(self, seconds: float) -> int:
        import torch

        def timed_call(side: BoundSide) -> Callable[[], float]:
            slots = len(side.calls)
            turns = iter(range(10**9))

            def call() -> float:
                start = time.perf_counter()
                side.run(next(turns) % slots)
                torch.cuda.synchronize()
                return current_group().max(time.perf_counter() - start)

            return call

        allocations = _allocations()

        def grew() -> bool:
            nonlocal allocations
            before, allocations = allocations, _allocations()
            return self._monitor.grew() or allocations != before

        calls = [timed_call(side) for side in self.sides]
        rounds = schedule.settle(calls, grew, least=self.budget.warmup, seconds=seconds)
        for side in self.sides:
            side.restore()
        return rounds

    def _choose_clock(self) -> tuple[str, tuple[CudaWindow, CudaWindow]]:
        if not self.pool.pair.as_called:
            # A blocking kernel on one GPU would also block the collectives of the other GPUs.
            for clock in ("graph", "queue") if current_group().world == 1 else ("graph",):
                try:
                    return clock, self._sized(clock)
                except (Uncapturable, Unblockable) as error:
                    self.notes[f"no {clock}"] = str(error).splitlines()[0]
        return "host", self._sized("host")

    def _sized(self, clock: str) -> tuple[CudaWindow, CudaWindow]:
        """Return two windows of about the same length, each long enough for this clock."""
        slots = len(self.pool.slots)
        windows = self._build(clock, [slots, slots])
        seconds = self._estimates(windows)
        least = self.budget.window or WINDOW[clock]
        for _ in range(SIZINGS):
            # The launch of a graph inflates the time of a few short calls, so the number of calls
            # is corrected.
            rounds = [calls_a_round(t, slots) for t in seconds]
            window = max(least, *(t * n for t, n in zip(seconds, rounds, strict=True)))
            counts = [
                calls_to_plant(calls_for(t, window, slots), n, max(self._planted))
                for t, n in zip(seconds, rounds, strict=True)
            ]
            if self.pool.pair.state is not None:
                counts = [min(count, schedule.MOST_STEPS) for count in counts]
            if all(abs(n - w.counted) <= NEAR * n for n, w in zip(counts, windows, strict=True)):
                break
            windows = self._build(clock, counts)
            seconds = self._estimates(windows)
        return windows

    def _build(
        self, clock: str, counts: Sequence[int], *, plant: bool = True
    ) -> tuple[CudaWindow, CudaWindow]:
        """Return a window of each side.

        If the capture fails on any rank, no rank uses this clock.

        Nothing is captured while a page's own threads run. A thread that pins memory during a
        capture would get an event that belongs to the graph.
        """
        make = WINDOWS[clock]
        if make is GraphWindow and "threads" in self.pool.pair.owns:
            raise Uncapturable(THREADS)
        extra = [
            extra_calls(n, p) if plant else 0 for n, p in zip(counts, self._planted, strict=True)
        ]

        def both() -> dict[int, CudaWindow]:
            return {s: make(self.sides[s], counts[s], extra[s]) for s in self._order}

        windows = on_all_ranks(both)
        if self.pool.pair.l2 == "cold" and self.pool.pair.state is None:
            for window in windows.values():
                if window.counted < len(self.pool.slots):  # long calls, which use few slots
                    window.before = functools.partial(l2.flush_l2, self._l2_bytes)
        return windows[0], windows[1]

    def _estimates(self, windows: Sequence[CudaWindow]) -> list[float]:
        return [max(_quick_time(window), FASTEST) for window in windows]

    def check_times(self) -> dict[str, object]:
        """Refuse a side if its clocks disagree, its L2 is warm, or its graph is not GPU work.

        This runs the sides again. Windows on the host's clock need no cross-check, because they
        wait for the whole device.
        """
        pair, results = self.pool.pair, dict[str, object]()
        if graphs := [window for window in self.windows if isinstance(window, GraphWindow)]:
            results |= check_nodes(graphs)
            rotates = pair.l2 == "cold" and pair.state is None and pair.bound not in LINKS
            if rotates and not pair.multi_rank:
                results |= l2.check_cold(graphs, len(self.pool.slots), self._l2_bytes)
        for window in self.windows:
            if isinstance(window, HostWindow):
                continue
            if wrong := contradiction(functools.partial(window.clocks, STRETCH)):
                raise SideError(f"{window.side.name}: {wrong}")
        return results

    def profile(self, seconds: Sequence[float]) -> dict[str, KernelProfile]:
        """Profile both sides. Refuse a side whose kernels run longer than its `seconds` per call.

        This runs the sides again. On the graph clock, a side is refused only if a profiled replay
        takes too long as well. On the host's clock, no side is refused, because the windows wait
        for all work. With several ranks, no side is refused, because kernels may wait for other
        ranks' profilers.
        """
        profiles = {}
        for side, window, expected in zip(self.sides, self.windows, seconds, strict=True):
            profile = profile_kernels(side.round, len(side.calls))
            side.restore()
            wrong = profile.contradiction(expected)
            clear = self.clock != "host" and current_group().world == 1
            if wrong and clear and self._runs_longer(window, profile, expected):
                raise SideError(f"{side.name}: {wrong}")
            profiles[side.name] = profile
        return profiles

    def _runs_longer(self, window: CudaWindow, called: KernelProfile, expected: float) -> bool:
        """Return whether kernels run longer than `expected` seconds, in calls and in a replay.

        Kernels on several streams, or with programmatic dependent launch, overlap in a graph. They
        often do not overlap when Python launches them. The replay must run the same kernels.
        """
        if not isinstance(window, GraphWindow):
            return True
        replayed = profile_kernels(window.replay, window.calls)
        window.side.restore()
        same = replayed.launches == called.launches
        return not same or bool(replayed.contradiction(expected))

    def other_clock(self) -> dict[str, object]:
        """Return each side's seconds per call from the other clock, which the verdict does not use.

        If the other clock cannot be used, return the reason instead.
        This runs the sides again and overwrites the outputs of timed calls.
        """
        import torch

        key, clock = ("gpu_only", "graph") if self.clock == "host" else ("as_called", "host")
        try:
            windows = self._build(clock, [len(self.pool.slots)] * 2, plant=False)
            return {key: [_quick_time(window) for window in windows]}
        except (Uncapturable, torch.OutOfMemoryError) as error:
            return {f"no {key}": str(error).splitlines()[0]}

    def memory(self) -> dict[str, object]:
        """Run the sides again, and return the bytes that a call of each side allocates."""
        peaks = [peak_bytes(side) for side in self.sides]
        return {"peak_bytes": dict(zip(ROLES, peaks, strict=True))}

    def refresh(self, *, last: bool) -> None:
        import torch

        self.pool.rewrite(self.sides, last=last)
        l2.flush_l2(self._l2_bytes)
        torch.cuda.synchronize()
        if self._runs_python:
            self._monitor.begin()

    def disturbance(self) -> Cause | None:
        machine = self.telemetry.disturbance()
        if not self._runs_python:
            return agreed_cause(None, machine)
        cause = agreed_cause(self._monitor.look(), machine or self._load.look())
        self._monitor.begin()
        return cause

    def details(self) -> dict[str, object]:
        on_host = [window for window in self.windows if isinstance(window, HostWindow)]
        return {
            **self.notes,
            **({"cpu_shares": cpu_shares(on_host)} if on_host else {}),
            "slots": len(self.pool.slots),
            "calls": [w.calls for w in self.windows],
            "counted": [w.counted for w in self.windows],
            **self.telemetry.summary(),
            "looks": self.telemetry.looks(),
            **current_group().details(),
            **({"housekeeping": self._monitor.counts()} if self._runs_python else {}),
        }


def _quick_time(window: Callable[[], float]) -> float:
    first = window()
    return window() if first > LONG_CALL else min(window() for _ in range(3))


def _allocations() -> int:
    """Return the number of times that the allocator has requested memory from the device."""
    import torch

    return int(torch.cuda.memory_stats().get("num_device_alloc", 0))
