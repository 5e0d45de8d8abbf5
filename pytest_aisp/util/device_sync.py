"""Hold a process still while it is measured: no garbage collection, no GPU work under way."""

from __future__ import annotations

import gc
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


def waiter(device: str) -> Callable[[], None]:
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
