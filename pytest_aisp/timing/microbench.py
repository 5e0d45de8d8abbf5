"""One callable of anyone's: run until it is steady, then timed window by window."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from ..proof.sides import Subject
from ..results.sizing import calls_for
from ..results.timing import settle
from .windows import GraphWindow, Uncapturable, host_window


def warm(function: Callable[[], Any]) -> int:
    """Call `function` until its time is steady and return the number of calls."""
    import torch

    from ..common.quiet import waiter

    wait = waiter("cuda" if torch.cuda.is_available() else "cpu")

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
    return [float(timed()) for _ in range(windows)]
