"""The timer of a CPU: long windows by the host's clock, a disturbed block measured again."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..checking.inputs import BoundSide, InputPool
from ..isolation.interference import InterferenceMonitor
from ..util.process_group import current_group
from . import schedule
from .schedule import Budget, calls_for, calls_to_plant, extra_calls
from .windows import host_window

WINDOW = 10e-3
"""Least seconds of a window."""
STOLEN = 0.05
"""A block is disturbed when the process waited this share of it for a core it was ready to use."""


class CpuPairTimer:
    """Two subjects on a CPU."""

    clock = "cpu"

    def __init__(
        self,
        bench: InputPool,
        subjects: tuple[BoundSide, BoundSide],
        budget: Budget,
        planted: float = 0.0,
    ) -> None:
        self.bench, self.subjects = bench, subjects
        self.keeping = InterferenceMonitor(bench.pair.owns)
        self._warmup = schedule.settle(
            [self._caller(s) for s in subjects],
            lambda: current_group().max(self.keeping.grew()) > 0,
            least=budget.warmup,
            seconds=1.0,
            clock=lambda: current_group().max(time.perf_counter()),
        )
        seconds = [min(self._caller(s)() for _ in range(3)) for s in subjects]
        window = max(budget.window or WINDOW, *seconds)
        slots = len(bench.slots)
        counts = [calls_to_plant(calls_for(t, window, slots), slots, planted) for t in seconds]
        if bench.pair.state is not None:
            counts = [min(count, schedule.MOST_STEPS) for count in counts]
        extra = 0, extra_calls(counts[1], planted)
        a, b = (
            host_window(s, n, x, "cpu") for s, n, x in zip(subjects, counts, extra, strict=True)
        )
        self.windows = a, b
        self._waited, self._since = _waiting(), time.perf_counter()
        self.keeping.begin()

    @staticmethod
    def _caller(subject: BoundSide) -> Any:
        def call() -> float:
            subject.restore()
            start = time.perf_counter()
            subject.run(0)
            return current_group().max(time.perf_counter() - start)

        return call

    def refresh(self, *, last: bool) -> None:
        self.bench.rewrite(self.subjects, last=last)
        self.keeping.begin()

    def disturbance(self) -> str | None:
        causes = [self.keeping.look(), self._waited_for_a_core()]
        self.keeping.begin()
        return current_group().first_message(", ".join(filter(None, causes)) or None)

    def _waited_for_a_core(self) -> str | None:
        waited, now = _waiting(), time.perf_counter()
        share = (waited - self._waited) / max(now - self._since, 1e-9)
        self._waited, self._since = waited, now
        return f"waited for a core {share:.0%} of the time" if share > STOLEN else None

    def check_times(self) -> dict[str, Any]:
        """A CPU has one clock."""
        return {}

    def profile(self, seconds: Sequence[float]) -> dict[str, Any]:
        """A CPU launches no kernels."""
        return {}

    def other(self) -> dict[str, Any]:
        """A CPU has one clock."""
        return {}

    def memory(self) -> dict[str, Any]:
        """Nobody counts what is allocated on a CPU."""
        return {}

    def details(self) -> dict[str, Any]:
        slots, calls = len(self.bench.slots), [w.calls for w in self.windows]
        counted = [w.counted for w in self.windows]
        return {
            "warmup": self._warmup,
            "slots": slots,
            "calls": calls,
            "counted": counted,
            "threads": _threads(),
            **current_group().details(),
            "housekeeping": self.keeping.counts(),
        }


def _waiting() -> float:
    """Return the seconds that this process's threads were ready but not running (0: unknown)."""
    waited = 0
    for stat in glob.glob("/proc/self/task/*/schedstat"):
        with suppress(OSError, IndexError, ValueError), open(stat) as file:
            waited += int(file.read().split()[1])
    return waited * 1e-9


def _threads() -> int:
    import torch

    return min(torch.get_num_threads(), os.cpu_count() or 1)
