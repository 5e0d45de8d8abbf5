"""The timer of a CUDA GPU: graph replay, a blocked queue, or the host's clock.

One mode for the pair, never per side. ``graph``: K calls captured in one CUDA graph, each timed
replay preceded on the stream by an untimed one. ``queue``: K calls behind a blocking kernel, so
that the GPU never waits for Python. ``host``: K calls as called between device synchronisations.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from . import cold, timing
from .clocks import STRETCH, Clocks, contradiction, read_clocks
from .device import Telemetry
from .kernels import launched
from .protections import on
from .quiet import no_gc, waiter
from .sides import SideError, Subject
from .timing import Budget, calls_for, calls_to_plant
from .witness import now_ns
from .workbench import Workbench

if TYPE_CHECKING:
    import torch

WINDOW = {"graph": 1e-3, "queue": 1e-3, "host": 5e-3}
"""Least seconds of a window, by clock."""
LINKS = ("pcie", "nvlink")
"""Bounds of what moves data past the L2."""
LONG_CALL = 1e-3
"""Calls longer than this are estimated from one window."""
SIZINGS = 3
"""Most times the number of calls in a window is corrected."""
NEAR = 0.25
"""A number of calls within this share of the wanted one is kept."""
SPIN_CYCLES = 2_000_000
"""First length of the blocking kernel: about 1 ms."""


class Uncapturable(RuntimeError):
    """A side cannot be captured in a CUDA graph; the message is CUDA's."""


class Unblockable(RuntimeError):
    """A side waits for the GPU, so its calls cannot be queued behind a blocking kernel."""


class GraphWindow:
    """K calls of one side in one CUDA graph, and `extra` ones that are not counted."""

    repeats = 2

    def __init__(self, subject: Subject, counted: int, extra: int = 0) -> None:
        import torch

        self.subject, self.counted, self.calls = subject, counted, counted + extra
        self._graph = capture(lambda: self._round())
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def _round(self) -> None:
        slots = len(self.subject.calls)
        for call in range(self.calls):
            self.subject.run(call % slots)

    def __call__(self) -> float:
        self._graph.replay()
        self.subject.restore()
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e-3 / self.counted

    def clocks(self, seconds: float) -> Clocks:
        """Return what the clocks say of replays that together last `seconds` or more."""
        replays = math.ceil(seconds / max(self(), 1e-9) / self.counted)

        def work() -> None:
            for _ in range(replays):
                self._graph.replay()

        return read_clocks(work, self._start, self._end)


class QueueWindow:
    """K calls of one side behind a blocking kernel, between two events."""

    repeats = 1

    def __init__(self, subject: Subject, counted: int, extra: int = 0) -> None:
        import torch

        self.subject, self.counted, self.calls = subject, counted, counted + extra
        self._cycles = SPIN_CYCLES
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self) -> float:
        import torch

        for _ in range(6):
            self.subject.restore()
            torch.cuda._sleep(self._cycles)
            self._start.record()
            slots = len(self.subject.calls)
            for call in range(self.calls):
                self.subject.run(call % slots)
            self._end.record()
            late = self._start.query()
            self._end.synchronize()
            if not late:
                return float(self._start.elapsed_time(self._end)) * 1e-3 / self.counted
            self._cycles *= 2
        raise Unblockable(f"{self.subject.name} waits for the GPU or launches too much to queue")

    def clocks(self, seconds: float) -> Clocks:
        """Return what the clocks say of one window; it is not made longer, as it must be queued."""
        import torch

        del seconds
        self.subject.restore()
        slots = len(self.subject.calls)

        def work() -> None:
            for call in range(self.calls):
                self.subject.run(call % slots)

        return read_clocks(work, self._start, self._end, lambda: torch.cuda._sleep(self._cycles))


class HostWindow:
    """K calls of one side as called, by the host's clock, the device idle at both ends."""

    repeats = 1

    def __init__(
        self, subject: Subject, counted: int, extra: int, synchronize: Callable[[], None]
    ) -> None:
        self.subject, self.counted, self.calls = subject, counted, counted + extra
        self._synchronize = synchronize

    def __call__(self) -> float:
        run, slots = self.subject.run, len(self.subject.calls)
        self.subject.restore()
        self._synchronize()
        start = now_ns()
        for call in range(self.calls):
            run(call % slots)
        self._synchronize()
        return (now_ns() - start) * 1e-9 / self.counted


class CudaBout:
    """Two subjects on one GPU, on the best clock that both can use.

    Args:
        order: who is built first.
        known: clock and counted calls of an earlier bout of this pair; then neither is sought
            again.
        planted: slowdown planted in the second side.
    """

    def __init__(
        self,
        bench: Workbench,
        subjects: tuple[Subject, Subject],
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
        self.notes["warmup"] = self._warm(1.0 if known is None else 0.0)
        if known is None:
            self.clock, self.windows = self._choose()
        else:
            self.clock = known[0]
            a, b = self._build(WINDOWS[self.clock], known[1])
            self.windows = a, b

    def _warm(self, seconds: float) -> int:
        import torch

        def call(subject: Subject) -> Callable[[], float]:
            slots = len(subject.calls)
            turns = iter(range(10**9))

            def once() -> float:
                start = time.perf_counter()
                subject.run(next(turns) % slots)
                torch.cuda.synchronize()
                return time.perf_counter() - start

            return once

        grew = _growth()
        rounds = timing.settle(
            [call(s) for s in self.subjects],
            grew,
            least=self.budget.warmup,
            seconds=seconds,
            clock=time.perf_counter,
        )
        for subject in self.subjects:
            subject.restore()
        return rounds

    def _choose(self) -> tuple[str, tuple[Any, Any]]:
        if not self.bench.pair.as_called:
            for clock in ("graph", "queue"):
                try:
                    return clock, self._sized(clock)
                except (Uncapturable, Unblockable) as error:
                    self.notes[f"no {clock}"] = str(error).splitlines()[0]
        return "host", self._sized("host")

    def _sized(self, clock: str) -> tuple[Any, Any]:
        slots, make = len(self.bench.slots), WINDOWS[clock]
        probes = self._build(make, [slots, slots])
        seconds = [self._quick(probe) for probe in probes]
        least = self.budget.window or WINDOW[clock]
        for _ in range(SIZINGS):
            # A few calls overstate a short one by the launch of their graph: size, time, size
            # again.
            window = max(least, *(t * slots for t in seconds))
            counts = [
                calls_to_plant(calls_for(t, window, slots), slots, max(self._planted))
                for t in seconds
            ]
            if self.bench.pair.state is not None:
                counts = [min(count, timing.MOST_STEPS) for count in counts]
            if all(abs(n - w.counted) <= NEAR * n for n, w in zip(counts, probes, strict=True)):
                break
            probes = self._build(make, counts)
            seconds = [self._quick(probe) for probe in probes]
        return probes[0], probes[1]

    def _build(self, make: Callable[[Subject, int, int], Any], counts: Sequence[int]) -> list[Any]:
        extra = [timing.extra_calls(n, p) for n, p in zip(counts, self._planted, strict=True)]
        made = {side: make(self.subjects[side], counts[side], extra[side]) for side in self._order}
        return [made[0], made[1]]

    @staticmethod
    def _quick(window: Callable[[], float]) -> float:
        first = window()  # the replays of a long window need no repetition
        return window() if first > LONG_CALL else min(window() for _ in range(3))

    def check_times(self) -> dict[str, Any]:
        """Refuse a side of which the clocks tell different times, or an L2 that is not cold.

        Runs the sides again. The host's clock needs no second opinion: it waits for the whole
        device as it is.

        Raises:
            SideError: with the times.
        """
        found = self._check_cold()
        for window in self.windows if self.clock != "host" else ():
            wrong = contradiction(functools.partial(window.clocks, STRETCH))
            if wrong:
                raise SideError(f"{window.subject.name}: {wrong}")
        return found

    def _check_cold(self) -> dict[str, Any]:
        """Refuse a pair whose calls leave in the L2 what was there before them."""
        pair = self.bench.pair
        rotates = pair.l2 == "cold" and pair.state is None and pair.bound not in LINKS
        if self.clock != "graph" or not rotates or not on("cold-l2"):
            return {}
        read = cold.reader()
        if read is None:
            return {"l2_cycles": None}
        found = {}
        for window in self.windows:
            name, latency = window.subject.name, cold.measure(window, read)
            found[name] = list(latency)
            if not latency.cold:
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
                is possible, as the host waits for everything.

        Raises:
            SideError: where kernels are at work for longer.
        """
        found = {}
        for subject, told in zip(self.subjects, seconds, strict=True):
            kernels = launched(subject.round, len(subject.calls))
            subject.restore()
            wrong = kernels.contradiction(told)
            if wrong and self.clock != "host":
                raise SideError(f"{subject.name}: {wrong}")
            found[subject.name] = asdict(kernels)
        return found

    def other(self) -> dict[str, Any]:
        """Return seconds per call on the clock that does not judge, or why there are none.

        Runs the sides again: whoever needs their timed outputs has read them before.
        """
        key = "gpu_only" if self.clock == "host" else "as_called"
        make: Any = GraphWindow if self.clock == "host" else host_window
        try:
            windows = [make(s, len(self.bench.slots)) for s in self.subjects]
            return {key: [self._quick(w) for w in windows]}
        except Uncapturable as error:
            return {f"no {key}": str(error).splitlines()[0]}

    def refresh(self, *, last: bool) -> None:
        import torch

        self.bench.rewrite(self.subjects, last=last)
        evict(self._l2)
        torch.cuda.synchronize()

    def disturbance(self) -> str | None:
        return self.telemetry.disturbance()

    def details(self) -> dict[str, Any]:
        return {
            **self.notes,
            "slots": len(self.bench.slots),
            "calls": [w.calls for w in self.windows],
            "counted": [w.counted for w in self.windows],
            **self.telemetry.summary(),
        }


def host_window(subject: Subject, counted: int, extra: int = 0, device: str = "cuda") -> HostWindow:
    """Return a window on the host's clock, `device` idle at both ends."""
    return HostWindow(subject, counted, extra, waiter(device))


WINDOWS: dict[str, Callable[[Subject, int, int], Any]] = {
    "graph": GraphWindow,
    "queue": QueueWindow,
    "host": host_window,
}


def capture(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Capture what `run` launches on a side stream and return the graph.

    Raises:
        Uncapturable: when CUDA refuses, with its first line.
    """
    import torch

    _refuse_waiting(run)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), no_gc():
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            run()
        except Exception as error:
            _abandon(graph)
            raise Uncapturable(str(error) or type(error).__name__) from error
        try:
            graph.capture_end()
        except RuntimeError as error:
            _abandon(graph)
            raise Uncapturable(str(error)) from error
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def _refuse_waiting(run: Callable[[], Any]) -> None:
    """Run once with every wait for the GPU an error: a failed capture is harder to clean up."""
    import torch

    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        raise Uncapturable(str(error)) from error
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    import torch

    with suppress(RuntimeError):  # the capture was invalidated: ending it is all there is to do
        graph.capture_end()
    torch.cuda.synchronize()
    # PyTorch leaves its random generator in capture mode; a capture that ends well resets it.
    empty = torch.cuda.CUDAGraph()
    empty.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device="cuda")
    empty.capture_end()


def evict(l2_bytes: int) -> None:
    """Read twice the L2, so that neither dirty lines nor the last window's data stay in it."""
    import torch

    torch.empty(2 * l2_bytes // 4, dtype=torch.float32, device="cuda").sum()


def _growth() -> Callable[[], bool]:
    import torch

    def allocated() -> int:
        return int(torch.cuda.memory_stats().get("num_device_alloc", 0))

    last = [allocated()]

    def grew() -> bool:
        now, before = allocated(), last[0]
        last[0] = now
        return now != before

    return grew


def time_callable(function: Callable[[], Any], *, window: float, windows: int) -> float:
    """Return the median seconds per call of one warmed callable."""
    import statistics

    import torch

    subject = Subject(function, [()])

    on_gpu = torch.cuda.is_available()
    host = functools.partial(host_window, subject, device="cuda" if on_gpu else "cpu")
    make: Callable[[int], Any] = host
    if on_gpu:
        try:
            GraphWindow(subject, 1)
            make = functools.partial(GraphWindow, subject)
        except Uncapturable:
            make = host
    calls = calls_for(make(1)(), window, 1)
    timed = make(calls)
    timed()
    return float(statistics.median(timed() for _ in range(windows)))
