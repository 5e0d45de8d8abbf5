"""The instruments of a real machine: its clock, its GPU's queue, torch.profiler."""

from __future__ import annotations

import time
from typing import Any

from .steps import Instruments, Stretch
from .stretch import BODY, Event

NO_GPU = "no GPU is used"
OTHER = "another profiler was running, and there can be one only"


def here() -> Instruments:
    """Return the instruments of this process."""
    return Instruments(time.perf_counter, _drain, _stretch)


def device() -> str:
    """Return what to call this process's device."""
    import torch

    if torch.cuda.is_initialized():
        return torch.cuda.get_device_name()
    from ..common.device import cpu_machine

    return cpu_machine().name


def memory_of_gpu() -> tuple[int, int]:
    """Return the bytes of the GPU and the most that PyTorch had reserved, or zeros without one."""
    import torch

    if not torch.cuda.is_initialized():
        return 0, 0
    return torch.cuda.mem_get_info()[1], torch.cuda.max_memory_reserved()


def _drain() -> None:
    import torch

    # A loop that never used a GPU shall not be given a context by us.
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _stretch() -> Stretch | str:
    import torch

    if not torch.cuda.is_initialized():
        return NO_GPU
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return OTHER
    return Profiled(gpu=True)


class Profiled:
    """A stretch under torch.profiler, started at once.

    Operators are recorded besides the GPU's work: only they tell `.item()` from other waits.
    """

    def __init__(self, *, gpu: bool) -> None:
        from torch.profiler import ProfilerActivity, profile

        on_gpu = [ProfilerActivity.CUDA] if gpu else []
        _drain()
        self._profiler = profile(activities=[ProfilerActivity.CPU, *on_gpu])
        self._lost = False
        self._profiler.start()
        self._mark: Any = None

    def body(self) -> None:
        """Open the annotation of a step's work."""
        from torch.profiler import record_function

        self._mark = record_function(BODY)
        self._mark.__enter__()

    def rest(self) -> None:
        """Close it."""
        self._mark.__exit__(None, None, None)

    def stop(self) -> None:
        """Wait for the GPU and stop the profiler."""
        _drain()
        try:
            self._profiler.stop()
        except RuntimeError:  # the loop's own has begun and ended: torch 2.11 raises, 2.13 does not
            self._lost = True

    def events(self) -> list[Event]:
        """Return what was seen, times in seconds; nothing where another profiler took over."""
        return [] if self._lost else [_event(e) for e in self._profiler.events() or []]


def _event(e: Any) -> Event:
    span, on_gpu = e.time_range, e.device_type.name == "CUDA"
    return Event(
        str(e.name), span.start * 1e-6, span.end * 1e-6, on_gpu, bool(e.is_user_annotation)
    )
