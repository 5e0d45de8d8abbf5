"""Timing on the CPU's clock. `HostWindow` is also used for GPU pages whose ordinary calls are
timed."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence

from ..checking.inputs import BoundSide, InputPool
from ..isolation.interference import Cause, InterferenceMonitor, agreed_cause
from ..isolation.monkeypatches import cpu_now, now_ns
from ..isolation.protections import enabled
from ..util.cpu_load import CpuLoad
from ..util.device_state import synchronizer
from ..util.process_group import current_group
from .cross_check import KernelProfile
from .schedule import MOST_STEPS, Budget, calls_for, calls_to_plant, extra_calls, settle
from .unseen_values import SHORT_WINDOW, UnseenValues, window_calls

WINDOW = 10e-3
"""Shortest length of a window, in seconds."""
SIMILAR = 4
"""If the two sides' call counts differ by less than this factor, both use the larger count.
"""
MALLOC_PARAMETERS = {
    -1: 64 << 20,  # M_TRIM_THRESHOLD
    -2: 128 << 10,  # M_TOP_PAD
    -3: 32 << 20,  # M_MMAP_THRESHOLD
    -4: 65536,  # M_MMAP_MAX
    -6: 0,  # M_PERTURB
}
"""The values of malloc's parameters, keyed by their number. glibc itself reaches these values in a
process that has freed a block of 32 MiB or more.
"""


def reset_malloc() -> None:
    """Set malloc's parameters, unless the user has set some of them for the whole process.

    With `mallopt`, a side could force each large allocation of the other side to map new pages. The
    current parameters cannot be read, so they are set before each window.
    """
    if MALLOPT is not None and enabled("malloc"):
        for number, value in MALLOC_PARAMETERS.items():
            MALLOPT(number, value)


def find_mallopt() -> Callable[[int, int], int] | None:
    """Return the C library's `mallopt`, or None if there is none or the user has set parameters."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return None
    return getattr(ctypes.CDLL(None), "mallopt", None)


MALLOPT = find_mallopt()
"""`mallopt`, looked up at import time, before a page can set malloc's environment variables."""


class HostWindow:
    """Time K calls of one side with the host's clock, from an idle device to an idle device.

    Attributes:
        before: a function that runs before each window.
        wall, cpu: the seconds of all finished windows, and this process's CPU seconds in them.
    """

    repeats = 1
    before: Callable[[], object] | None = None

    def __init__(self, side: BoundSide, counted: int, extra: int = 0, device: str = "cuda") -> None:
        self.side, self.counted, self.calls = side, counted, counted + extra
        self._extra, self._synchronize = extra, synchronizer(device)
        self.wall = self.cpu = 0.0

    def __call__(self) -> float:
        self.side.restore()
        if self.before is not None:
            self.before()
        reset_malloc()
        self._synchronize()
        current_group().start_window("cpu")
        cpu, start = cpu_now(), now_ns()
        self.side.cycle(self.counted, self._extra)
        self._synchronize()
        seconds = (now_ns() - start) * 1e-9
        self.cpu, self.wall = self.cpu + cpu_now() - cpu, self.wall + seconds
        return current_group().slowest(seconds) / self.counted


def cpu_shares(windows: Sequence[HostWindow]) -> list[float]:
    """Return each window's CPU time divided by its wall time: 2.0 means two busy threads."""
    return [round(window.cpu / max(window.wall, 1e-9), 3) for window in windows]


class UnseenWindow(HostWindow):
    """Time K calls of one side on a CPU, each on values that no side has seen."""

    def __init__(self, side: BoundSide, counted: int, extra: int, unseen: UnseenValues) -> None:
        super().__init__(side, counted, extra, device="cpu")
        self._unseen = unseen

    def __call__(self) -> float:
        reset_malloc()
        self.side.run(0)
        reset_malloc()
        self._unseen.draw(self.calls)
        self._unseen.write(self.side)
        cpu, start = cpu_now(), now_ns()
        self.side.cycle(self.calls)
        end = now_ns()
        self.cpu, self.wall = self.cpu + cpu_now() - cpu, self.wall + (end - start) * 1e-9
        self._unseen.keep(self.side)
        return (end - start) * 1e-9 / self.counted


class CpuPairTimer:
    """Time two sides on a CPU.

    Args:
        unseen: the source of values for each window, or None if windows repeat the value sets.
    """

    clock = "cpu"

    def __init__(
        self,
        pool: InputPool,
        sides: tuple[BoundSide, BoundSide],
        budget: Budget,
        planted: float = 0.0,
        unseen: UnseenValues | None = None,
    ) -> None:
        self.pool, self.sides, self.unseen = pool, sides, unseen
        self._monitor = InterferenceMonitor(pool.pair.owns)
        calls = [self._timed_call(side) for side in sides]
        self._warmup = settle(calls, self._monitor.grew, least=budget.warmup, seconds=1.0)
        least = budget.window or WINDOW
        self.windows: tuple[HostWindow, HostWindow]
        if unseen is None:
            self.windows = self._repeated(calls, least, planted)
        else:
            self.windows = self._unseen(unseen, least, planted)
        self._load = CpuLoad()
        self._monitor.begin()

    def _repeated(
        self, calls: Sequence[Callable[[], float]], least: float, planted: float
    ) -> tuple[HostWindow, HostWindow]:
        seconds = [min(call() for _ in range(3)) for call in calls]
        window, slots = max(least, *seconds), len(self.pool.slots)
        counts = [calls_to_plant(calls_for(t, window, slots), slots, planted) for t in seconds]
        if self.pool.pair.state is not None:
            counts = [min(count, MOST_STEPS) for count in counts]
        first, second = self.sides
        extra = extra_calls(counts[1], planted)
        return (
            HostWindow(first, counts[0], device="cpu"),
            HostWindow(second, counts[1], extra, device="cpu"),
        )

    def _unseen(
        self, unseen: UnseenValues, least: float, planted: float
    ) -> tuple[HostWindow, HostWindow]:
        """Return windows with new values."""
        seconds = [self._unseen_seconds(side, unseen) for side in self.sides]
        window, slots = max(least, *seconds), len(self.pool.slots)
        drawing = unseen.draw_seconds
        counts = [window_calls(t, window, slots, drawing, planted) for t in seconds]
        if max(counts) <= SIMILAR * min(counts):
            counts = [max(counts)] * 2  # so that the first call has the same weight on both sides
        first, second = self.sides
        extra = extra_calls(counts[1], planted)
        return (
            UnseenWindow(first, counts[0], 0, unseen),
            UnseenWindow(second, counts[1], extra, unseen),
        )

    @staticmethod
    def _timed_call(side: BoundSide) -> Callable[[], float]:
        def call() -> float:
            side.restore()
            start = time.perf_counter()
            side.run(0)
            return current_group().max(time.perf_counter() - start)

        return call

    def _unseen_seconds(self, side: BoundSide, unseen: UnseenValues) -> float:
        """Return the seconds per call. If calls are short, the windows take about 1 ms."""
        single = UnseenWindow(side, 1, 0, unseen)
        seconds = min(single() for _ in range(3))
        calls = min(len(self.pool.slots), int(SHORT_WINDOW / seconds))
        if calls < 2:
            return seconds
        several = UnseenWindow(side, calls, 0, unseen)
        return min(several() for _ in range(3))

    def refresh(self, *, last: bool) -> None:
        if self.unseen is None:
            self.pool.rewrite(self.sides, last=last)
        self._monitor.begin()

    def disturbance(self) -> Cause | None:
        cause = agreed_cause(self._monitor.look(), self._load.look())
        self._monitor.begin()
        return cause

    def check_times(self) -> dict[str, object]:
        """Return nothing, because a CPU has no second clock to compare with."""
        return {}

    def profile(self, seconds: Sequence[float]) -> dict[str, KernelProfile]:
        """Return nothing, because a CPU launches no kernels."""
        return {}

    def other_clock(self) -> dict[str, object]:
        """Return nothing, because a CPU has no other clock."""
        return {}

    def memory(self) -> dict[str, object]:
        """Return nothing, because CPU allocations are not measured."""
        return {}

    def details(self) -> dict[str, object]:
        import torch

        return {
            "warmup": self._warmup,
            "slots": len(self.pool.slots),
            "calls": [w.calls for w in self.windows],
            "counted": [w.counted for w in self.windows],
            "cpu_shares": cpu_shares(self.windows),
            "threads": min(torch.get_num_threads(), os.cpu_count() or 1),
            **current_group().details(),
            "housekeeping": self._monitor.counts(),
        }
