"""Windows of GPU work: K calls of one side, and the seconds that a call took.

``graph``: K calls captured in one CUDA graph, each timed replay preceded on the stream by an
untimed one. ``queue``: K calls behind a blocking kernel, so that the GPU never waits for Python.
``host``: K calls as called, the device idle at both ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..checking.inputs import BoundSide
from ..isolation.monkeypatches import now_ns
from ..util.device_state import no_gc, synchronizer
from ..util.process_group import current_group
from . import graph_nodes
from .cross_check import Clocks, read_clocks

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
abandoned: list[tuple[int, int]] = []
"""The memory pools of captures that have failed in this process. What else torch keeps of such a
capture is not known in every version of it, so the process answers no more tasks."""
WINDOW = {"graph": 1e-3, "queue": 1e-3, "host": 5e-3}
"""Least seconds of a window, by clock."""
SCARCE = 1 / 4
"""Share of a GPU's memory below which a capture may run short of it."""
SPIN_CYCLES = 2_000_000
"""First length of the blocking kernel: about 1 ms."""


class Uncapturable(RuntimeError):
    """A side cannot be captured in a CUDA graph; the message is CUDA's."""


class Unblockable(RuntimeError):
    """A side waits for the GPU, so its calls cannot be queued behind a blocking kernel."""


class GraphWindow:
    """K calls of one side in one CUDA graph, and `extra` ones that are not counted."""

    repeats = 2

    def __init__(self, subject: BoundSide, counted: int, extra: int = 0) -> None:
        import torch

        self.subject, self.counted, self.calls = subject, counted, counted + extra
        self._graph = capture(lambda: subject.cycle(counted, extra))
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self) -> float:
        self._graph.replay()
        self.subject.restore()
        current_group().start_window("cuda")
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        seconds = float(self._start.elapsed_time(self._end)) * 1e-3
        return current_group().slowest(seconds) / self.counted

    def nodes(self) -> dict[str, int]:
        """Return how many nodes of each type the graph has. Raises `nodes.Uncounted`."""
        return graph_nodes.count(self._graph)

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

    def __init__(self, subject: BoundSide, counted: int, extra: int = 0) -> None:
        import torch

        self.subject, self.counted, self.calls = subject, counted, counted + extra
        self._extra, self._cycles = extra, SPIN_CYCLES
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self) -> float:
        import torch

        for _ in range(6):
            self.subject.restore()
            torch.cuda._sleep(self._cycles)
            self._start.record()
            self.subject.cycle(self.counted, self._extra)
            self._end.record()
            late = self._start.query()
            self._end.synchronize()
            if not late:
                return float(self._start.elapsed_time(self._end)) * 1e-3 / self.counted
            self._cycles *= 2
        raise Unblockable(f"{self.subject.name} waits for the GPU or launches too much to queue")

    def clocks(self, seconds: float) -> Clocks:
        """Return what the clocks say of one window; it is not made longer, as it must be queued.

        Work on another stream may be over before the blocking kernel is: how late it is shows a
        second reading without that.
        """
        import torch

        del seconds

        def work() -> None:
            self.subject.cycle(self.counted, self._extra)

        def read(before: Callable[[], None] | None) -> Clocks:
            self.subject.restore()
            return read_clocks(work, self._start, self._end, before)

        blocked, free = read(lambda: torch.cuda._sleep(self._cycles)), read(None)
        return replace(blocked, late=max(blocked.late, free.late), queued=True)


class HostWindow:
    """K calls of one side as called, by the host's clock, the device idle at both ends."""

    repeats = 1

    def __init__(
        self, subject: BoundSide, counted: int, extra: int, synchronize: Callable[[], None]
    ) -> None:
        self.subject, self.counted, self.calls = subject, counted, counted + extra
        self._extra, self._synchronize = extra, synchronize

    def __call__(self) -> float:
        self.subject.restore()
        self._synchronize()
        current_group().start_window("cpu")
        start = now_ns()
        self.subject.cycle(self.counted, self._extra)
        self._synchronize()
        return current_group().slowest((now_ns() - start) * 1e-9) / self.counted


def host_window(
    subject: BoundSide, counted: int, extra: int = 0, device: str = "cuda"
) -> HostWindow:
    """Return a window on the host's clock, `device` idle at both ends."""
    return HostWindow(subject, counted, extra, synchronizer(device))


WINDOWS: dict[str, Callable[[BoundSide, int, int], Any]] = {
    "graph": GraphWindow,
    "queue": QueueWindow,
    "host": host_window,
}


def on_all_ranks(make: Callable[[], T]) -> T:
    """Return what `make` captures, where every rank can capture its own.

    Raises:
        Uncapturable: on all ranks, where one of them could not.
    """
    made: list[T] = []
    refused = None
    try:
        made.append(make())
    except Uncapturable as error:
        refused = str(error)
    refused = current_group().first_message(refused)
    if refused is not None:
        raise Uncapturable(refused)
    return made[0]


def capture(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Capture what `run` launches on a side stream and return the graph, which keeps its nodes.

    Raises:
        Uncapturable: when CUDA refuses, with its first line.
        torch.OutOfMemoryError: when memory does not suffice.
    """
    import torch

    _refuse_waiting(run)
    graph, stream = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream()
    pool = torch.cuda.graph_pool_handle()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    if free < SCARCE * total:
        torch.cuda.empty_cache()  # what is cached cannot be given back while a graph is captured
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), no_gc():
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            run()
            graph.capture_end()
            graph.instantiate()
        except torch.OutOfMemoryError:  # another clock needs as much: a failure of the side's
            _abandon(graph, pool)
            raise
        except Exception as error:
            _abandon(graph, pool)
            raise Uncapturable(str(error) or type(error).__name__) from error
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def _stop_allocating(pool: tuple[int, int]) -> None:
    """Tell torch's allocator that nothing is captured any more, where ending the capture has not.

    Up to torch 2.11 an error of CUDA's skips that (pytorch/pytorch#180395): the allocator would
    give back no memory as long as the process lives.
    """
    import torch

    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # it was told
        return
    torch._C._cuda_releasePool(device, pool)


def _refuse_waiting(run: Callable[[], Any]) -> None:
    """Run once with every wait for the GPU an error: a failed capture is harder to clean up."""
    import torch

    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise Uncapturable(str(error)) from error
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _abandon(graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
    """End a capture that failed, as far as that is possible; the process is exhausted after it."""
    import torch

    abandoned.append(pool)
    with suppress(RuntimeError):  # the capture was invalidated: ending it is all there is to do
        graph.capture_end()
    _stop_allocating(pool)
    torch.cuda.synchronize()
    # PyTorch leaves its random generator in capture mode; a capture that ends well resets it.
    empty = torch.cuda.CUDAGraph()
    empty.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device="cuda")
    empty.capture_end()
