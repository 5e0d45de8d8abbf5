"""The timer of a CUDA GPU: two sides on the best clock that both can use, and what proves it.

One clock for the pair, never per side: graph replay, a blocked queue, or the host's (`windows`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ..checking.inputs import BoundSide, InputPool
from ..isolation import interference
from ..isolation.protections import enabled
from ..page.pair import SideError
from ..util.device_state import Telemetry
from ..util.process_group import current_group
from . import graph_nodes, l2_check, schedule
from .cross_check import STRETCH, contradiction
from .kernel_profile import launched
from .memory import peak_bytes
from .schedule import Budget, calls_a_round, calls_for, calls_to_plant, extra_calls
from .windows import (
    WINDOW,
    WINDOWS,
    GraphWindow,
    Unblockable,
    Uncapturable,
    host_window,
    on_all_ranks,
)

LINKS = ("pcie", "nvlink")
"""Bounds of what moves data past the L2."""
LONG_CALL = 1e-3
"""Calls longer than this are estimated from one window."""
SIZINGS = 3
"""Most times the number of calls in a window is corrected."""
FASTEST = 5e-7
"""Seconds that a call lasts at least: an empty node of a graph takes twice as long. Who seems
faster does not work: no graph of a million calls is needed to find that out."""
NEAR = 0.25
"""A number of calls within this share of the wanted one is kept."""
THREADS = "the page owns threads, which a capture would disturb"
"""Why a page that owns threads is never captured."""


class CudaPairTimer:
    """Two subjects on one GPU, on the best clock that both can use.

    Args:
        order: who is built first.
        known: clock and counted calls of an earlier bout of this pair; then neither is sought
            again.
        planted: slowdown planted in the second side.
    """

    def __init__(
        self,
        bench: InputPool,
        subjects: tuple[BoundSide, BoundSide],
        budget: Budget,
        order: tuple[int, int] = (0, 1),
        known: tuple[str, Sequence[int]] | None = None,
        planted: float = 0.0,
    ) -> None:
        import torch

        self.bench, self.subjects, self.budget, self._order = bench, subjects, budget, order
        self._planted = 0.0, planted
        self.telemetry = Telemetry(torch.cuda.current_device())
        self._l2 = torch.cuda.get_device_properties().L2_cache_size
        self.notes: dict[str, Any] = {}
        self.keeping = interference.InterferenceMonitor(bench.pair.owns, _allocations)
        self.notes["warmup"] = self._warm(1.0 if known is None else 0.0)
        if known is None:
            self.clock, self.windows = self._choose()
        else:
            self.clock = known[0]
            a, b = self._build(WINDOWS[self.clock], known[1])
            self.windows = a, b
        self._counts = self.clock in interference.CLOCKS  # a replay runs no Python

    def _warm(self, seconds: float) -> int:
        import torch

        def call(subject: BoundSide) -> Callable[[], float]:
            slots = len(subject.calls)
            turns = iter(range(10**9))

            def once() -> float:
                start = time.perf_counter()
                subject.run(next(turns) % slots)
                torch.cuda.synchronize()
                return current_group().max(time.perf_counter() - start)

            return once

        grew = _growth()
        rounds = schedule.settle(
            [call(s) for s in self.subjects],
            lambda: current_group().max(any([grew(), self.keeping.grew()])) > 0,
            least=self.budget.warmup,
            seconds=seconds,
            clock=lambda: current_group().max(time.perf_counter()),
        )
        for subject in self.subjects:
            subject.restore()
        return rounds

    def _choose(self) -> tuple[str, tuple[Any, Any]]:
        if not self.bench.pair.as_called:
            # A kernel that blocks one GPU would block the others in their collectives.
            for clock in ("graph", "queue") if current_group().world == 1 else ("graph",):
                try:
                    return clock, self._sized(clock)
                except (Uncapturable, Unblockable) as error:
                    self.notes[f"no {clock}"] = str(error).splitlines()[0]
        return "host", self._sized("host")

    def _sized(self, clock: str) -> tuple[Any, Any]:
        slots, make = len(self.bench.slots), WINDOWS[clock]
        probes = self._build(make, [slots, slots])
        seconds = self._estimates(probes)
        least = self.budget.window or WINDOW[clock]
        for _ in range(SIZINGS):
            # A few calls overstate a short one by the launch of their graph: size, time, size
            # again.
            rounds = [calls_a_round(t, slots) for t in seconds]
            window = max(least, *(t * n for t, n in zip(seconds, rounds, strict=True)))
            counts = [
                calls_to_plant(calls_for(t, window, slots), n, max(self._planted))
                for t, n in zip(seconds, rounds, strict=True)
            ]
            if self.bench.pair.state is not None:
                counts = [min(count, schedule.MOST_STEPS) for count in counts]
            if all(abs(n - w.counted) <= NEAR * n for n, w in zip(counts, probes, strict=True)):
                break
            probes = self._build(make, counts)
            seconds = self._estimates(probes)
        return probes[0], probes[1]

    def _build(
        self, make: Callable[[BoundSide, int, int], Any], counts: Sequence[int]
    ) -> list[Any]:
        extra = [extra_calls(n, p) for n, p in zip(counts, self._planted, strict=True)]
        return self._made(make, counts, extra)

    def _made(
        self,
        make: Callable[[BoundSide, int, int], Any],
        counts: Sequence[int],
        extra: Sequence[int],
    ) -> list[Any]:
        """Return a window of each side; if one rank's is refused, so is every rank's.

        Nothing is captured amid a page's own threads: one that pins memory meanwhile is left with
        an event of the graph, and so is the process.
        """
        if make is GraphWindow and "threads" in self.bench.pair.owns:
            raise Uncapturable(THREADS)

        def both() -> dict[int, Any]:
            return {s: make(self.subjects[s], counts[s], extra[s]) for s in self._order}

        made = on_all_ranks(both)
        return [made[0], made[1]]

    def _estimates(self, windows: Sequence[Any]) -> list[float]:
        return [max(self._quick(window), FASTEST) for window in windows]

    @staticmethod
    def _quick(window: Callable[[], float]) -> float:
        first = window()  # the replays of a long window need no repetition
        return window() if first > LONG_CALL else min(window() for _ in range(3))

    def check_times(self) -> dict[str, Any]:
        """Refuse a side of which the clocks tell different times, or an L2 that is not cold.

        Refuses a graph that is no GPU's work, too. Runs the sides again. The host's clock needs no
        second opinion: it waits for the whole device as it is.

        Raises:
            SideError: with the times.
        """
        found = graph_nodes.check(self.windows) if self.clock == "graph" else {}
        found |= self._check_cold()
        for window in self.windows if self.clock != "host" else ():
            wrong = contradiction(functools.partial(window.clocks, STRETCH))
            if wrong:
                raise SideError(f"{window.subject.name}: {wrong}")
        return found

    def _check_cold(self) -> dict[str, Any]:
        """Refuse a pair whose calls leave in the L2 what was there before them.

        Of calls so long that they go through fewer slots nothing is asked (`sizing.LONG`).
        """
        pair = self.bench.pair
        rotates = pair.l2 == "cold" and pair.state is None and pair.bound not in LINKS
        rotates &= not pair.multi_rank
        if self.clock != "graph" or not rotates or not enabled("cold-l2"):
            return {}
        read = l2_check.reader()
        if read is None:
            return {"l2_cycles": None}
        found = {}
        for window in self.windows:
            name, latency = window.subject.name, l2_check.measure(window, read)
            found[name] = list(latency)
            if not latency.cold and window.counted >= len(self.bench.slots):
                raise SideError(
                    f"{name}: the L2 is not cold: a load takes {latency.warm:.0f} cycles when its"
                    f" line was just read, and {latency.after:.0f} after a round of calls;"
                    " declare l2='warm' or a larger size"
                )
        return {"l2_cycles": found}

    def profile(self, seconds: Sequence[float]) -> dict[str, Any]:
        """Return by side what it launches. Runs the sides again.

        Args:
            seconds: per call of each side, as the windows say; on the host's clock no contradiction
                is possible, as the host waits for everything, and none on several ranks, where
                kernels are at work while they wait for another rank's profiler to begin.

        Raises:
            SideError: where kernels are at work for longer.
        """
        found = {}
        for subject, told in zip(self.subjects, seconds, strict=True):
            kernels = launched(subject.round, len(subject.calls))
            subject.restore()
            wrong = kernels.contradiction(told)
            if wrong and self.clock != "host" and current_group().world == 1:
                raise SideError(f"{subject.name}: {wrong}")
            found[subject.name] = asdict(kernels)
        return found

    def other(self) -> dict[str, Any]:
        """Return seconds per call on the clock that does not judge, or why there are none.

        Runs the sides again: whoever needs their timed outputs has read them before.
        """
        import torch

        key = "gpu_only" if self.clock == "host" else "as_called"
        make: Any = GraphWindow if self.clock == "host" else host_window
        try:
            windows = self._made(make, [len(self.bench.slots)] * 2, (0, 0))
            return {key: [self._quick(w) for w in windows]}
        except (Uncapturable, torch.OutOfMemoryError) as error:
            return {f"no {key}": str(error).splitlines()[0]}

    def memory(self) -> dict[str, Any]:
        """Return by side the bytes that a call needs beyond its inputs. Runs the sides again."""
        peaks = [peak_bytes(subject) for subject in self.subjects]
        return {"peak_bytes": dict(zip(graph_nodes.ROLES, peaks, strict=True))}

    def refresh(self, *, last: bool) -> None:
        import torch

        self.bench.rewrite(self.subjects, last=last)
        evict(self._l2)
        torch.cuda.synchronize()
        if self._counts:
            self.keeping.begin()

    def disturbance(self) -> str | None:
        causes = [self.keeping.look() if self._counts else None, self.telemetry.disturbance()]
        if self._counts:
            self.keeping.begin()
        return current_group().first_message(", ".join(filter(None, causes)) or None)

    def details(self) -> dict[str, Any]:
        return {
            **self.notes,
            "slots": len(self.bench.slots),
            "calls": [w.calls for w in self.windows],
            "counted": [w.counted for w in self.windows],
            **self.telemetry.summary(),
            "looks": self.telemetry.looks(),
            **current_group().details(),
            **({"housekeeping": self.keeping.counts()} if self._counts else {}),
        }


def evict(l2_bytes: int) -> None:
    """Read twice the L2, so that neither dirty lines nor the last window's data stay in it."""
    import torch

    torch.empty(2 * l2_bytes // 4, dtype=torch.float32, device="cuda").sum()


def _allocations() -> int:
    """Return how often the allocator has asked the device for memory."""
    import torch

    return int(torch.cuda.memory_stats().get("num_device_alloc", 0))


def _growth() -> Callable[[], bool]:
    last = [_allocations()]

    def grew() -> bool:
        now, before = _allocations(), last[0]
        last[0] = now
        return now != before

    return grew
