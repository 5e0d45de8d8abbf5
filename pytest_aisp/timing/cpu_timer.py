"""Timing on the CPU's clock. GPU pages that are timed as called use its `HostWindow` too."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ..checking.inputs import BoundSide, InputPool
from ..isolation.interference import InterferenceMonitor
from ..isolation.monkeypatches import now_ns
from ..util.device_state import synchronizer
from ..util.process_group import current_group
from .cross_check import KernelProfile
from .schedule import MOST_STEPS, Budget, calls_for, calls_to_plant, extra_calls, settle

WINDOW = 10e-3
"""Shortest length of a window, in seconds."""
STOLEN = 0.05
"""A block is disturbed if its threads waited for a CPU core for more than this share of it."""


class HostWindow:
    """Time K calls of one side with the host's clock, from an idle device to an idle device."""

    repeats = 1

    def __init__(self, side: BoundSide, counted: int, extra: int = 0, device: str = "cuda") -> None:
        self.side, self.counted, self.calls = side, counted, counted + extra
        self._extra, self._synchronize = extra, synchronizer(device)

    def __call__(self) -> float:
        self.side.restore()
        self._synchronize()
        current_group().start_window("cpu")
        start = now_ns()
        self.side.cycle(self.counted, self._extra)
        self._synchronize()
        return current_group().slowest((now_ns() - start) * 1e-9) / self.counted


class CpuPairTimer:
    """Time two sides on a CPU."""

    clock = "cpu"

    def __init__(
        self,
        pool: InputPool,
        sides: tuple[BoundSide, BoundSide],
        budget: Budget,
        planted: float = 0.0,
    ) -> None:
        self.pool, self.sides = pool, sides
        self._monitor = InterferenceMonitor(pool.pair.owns)
        calls = [self._timed_call(side) for side in sides]
        self._warmup = settle(calls, self._monitor.grew, least=budget.warmup, seconds=1.0)
        seconds = [min(call() for _ in range(3)) for call in calls]
        window = max(budget.window or WINDOW, *seconds)
        slots = len(pool.slots)
        counts = [calls_to_plant(calls_for(t, window, slots), slots, planted) for t in seconds]
        if pool.pair.state is not None:
            counts = [min(count, MOST_STEPS) for count in counts]
        self.windows = (
            HostWindow(sides[0], counts[0], device="cpu"),
            HostWindow(sides[1], counts[1], extra_calls(counts[1], planted), device="cpu"),
        )
        self._waited, self._since = _waiting(), time.perf_counter()
        self._monitor.begin()

    @staticmethod
    def _timed_call(side: BoundSide) -> Callable[[], float]:
        def call() -> float:
            side.restore()
            start = time.perf_counter()
            side.run(0)
            return current_group().max(time.perf_counter() - start)

        return call

    def refresh(self, *, last: bool) -> None:
        self.pool.rewrite(self.sides, last=last)
        self._monitor.begin()

    def disturbance(self) -> str | None:
        causes = [self._monitor.look(), self._waited_for_a_core()]
        self._monitor.begin()
        return current_group().first_message(", ".join(filter(None, causes)) or None)

    def _waited_for_a_core(self) -> str | None:
        waited, now = _waiting(), time.perf_counter()
        share = (waited - self._waited) / max(now - self._since, 1e-9)
        self._waited, self._since = waited, now
        return f"waited for a core {share:.0%} of the time" if share > STOLEN else None

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
            "threads": min(torch.get_num_threads(), os.cpu_count() or 1),
            **current_group().details(),
            "housekeeping": self._monitor.counts(),
        }


def _waiting() -> float:
    """Return the seconds that this process's threads have waited for a core; 0 if unknown."""
    waited = 0
    for stat in glob.glob("/proc/self/task/*/schedstat"):
        with suppress(OSError, IndexError, ValueError), open(stat) as file:
            waited += int(file.read().split()[1])
    return waited * 1e-9
