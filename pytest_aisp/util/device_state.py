"""Hold a process still while it is measured: no garbage collection, no GPU work under way."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def no_gc() -> Iterator[None]:
    """Keep Python's garbage collector out of the block."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def synchronizer(device: str) -> Callable[[], None]:
    """Return what waits until `device` has done its work: on a CPU there is nothing to wait for."""
    if not device.startswith("cuda"):
        return _nothing
    import torch

    return torch.cuda.synchronize


def _nothing() -> None:
    """Calls on a CPU are done when they return."""


def free_bytes() -> int:
    """Return the GPU's free memory, what torch's allocator keeps and nobody uses included."""
    import torch

    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return int(torch.cuda.mem_get_info()[0]) + unused


def release(device: str) -> None:
    """Give back what nothing holds any more, so that the next buffers lie elsewhere."""
    import torch

    gc.collect()
    gc.freeze()  # what is alive now stays: later collections do not walk through torch again
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


class Stopwatch:
    """Count seconds by phase. A phase inside another stops the outer one's count."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phase, self._since = "other", time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what passes in the block as `name`."""
        outer = self._turn(name)
        try:
            yield
        finally:
            self._turn(outer)

    def _turn(self, name: str) -> str:
        now, before = time.perf_counter(), self._phase
        self.seconds[before] = self.seconds.get(before, 0.0) + now - self._since
        self._phase, self._since = name, now
        return before

    def start(self) -> None:
        """Forget what was counted: what follows is another request's."""
        self._since, self.seconds = time.perf_counter(), {}

    def read(self) -> dict[str, float]:
        """Return the seconds by phase since the last reading, and begin anew."""
        self._turn(self._phase)
        seconds, self.seconds = self.seconds, {}
        return {name: round(value, 4) for name, value in seconds.items()}
