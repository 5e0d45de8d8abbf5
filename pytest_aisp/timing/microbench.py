"""One callable of anyone's: run until it is steady, then timed window by window."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..checking.inputs import BoundSide
from .schedule import calls_for, settle
from .windows import GraphWindow, Uncapturable, host_window

if TYPE_CHECKING:
    import torch


def warm(function: Callable[[], Any]) -> int:
    """Call `function` until its time is steady and return the number of calls."""
    import torch

    from ..util.device_state import synchronizer

    wait = synchronizer("cuda" if torch.cuda.is_available() else "cpu")

    def once() -> float:
        start = time.perf_counter()
        function()
        wait()
        return time.perf_counter() - start

    return settle([once], lambda: False, least=3, seconds=2.0, clock=time.perf_counter)


def window_times(function: Callable[[], Any], *, window: float, windows: int) -> list[float]:
    """Return for each window the seconds per call of a warmed callable.

    On a GPU by graph replay where `function` can be captured, else between synchronisations.
    """
    import torch

    subject = BoundSide(function, [()])

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
    return [float(timed()) for _ in range(windows)]


WARMUP = 3


def capture(step: Callable[[], Any], *, pool: Any = None) -> Callable[[], Any]:
    """Capture `step` in a CUDA graph and return a callable that replays it.

    `step` runs three times first on a side stream, so that whatever it makes lazily exists. The
    returned callable returns `step`'s outputs, which every replay overwrites. Without a GPU it is
    `step` itself, so that the page's results can be checked anywhere.

    Args:
        pool: memory that several graphs share (`torch.cuda.graph_pool_handle()`); by default the
            graph has its own. Graphs that share are replayed one after the other.

    Source: PyTorch's notes on CUDA graphs ("CUDA semantics").
    """
    import torch

    if not torch.cuda.is_available():
        return step
    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        outputs = step()

    def replay() -> Any:
        graph.replay()
        return outputs

    return replay


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    """Return the stream on which everything is captured: cuBLAS keeps a workspace for each."""
    import torch

    return torch.cuda.Stream(device)
