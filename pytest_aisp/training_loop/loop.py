"""Measure the steps of a training loop: their time on the host's clock, and the GPU's work."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from ..timing.cross_check import union

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """The number of steps in each phase: warm-up, profiled, and timed.

    Steps are profiled only if a GPU is used. If `steps` is None, all other steps are timed.
    """

    warmup: int = 5
    profiled: int = 10
    steps: int | None = None


@dataclass(frozen=True)
class Step:
    """The seconds that the loop waited for a batch, and the seconds that it worked on the batch.

    `first` is True for the first step of an epoch.
    """

    wait: float
    body: float
    first: bool = False


class Instruments:
    """The tools that measure a loop: a clock, the GPU synchronization, and a profiler."""

    def clock(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        """Wait for the GPU, but create no CUDA context if the loop uses no GPU."""
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def profile(self) -> TorchProfile | str:
        """Start and return the profiler, or return the reason why profiling is not possible."""
        import torch

        if not torch.cuda.is_initialized():
            return "no GPU is used"
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            return "another profiler was running, and a process can have only one"
        self.synchronize()
        return TorchProfile(gpu=True)


class Loop:
    """Times one loop. The caller must call `request` and `receive` for each batch.

    Attributes:
        drained: the seconds that the GPU kept working after the last timed step of an epoch, summed
            over all epochs.
        profile: the profiler, or None if profiling was impossible for the reason in `note`.
        profiled: the number of profiled steps.
    """

    def __init__(
        self, plan: Plan, instruments: Instruments, *, ready: Callable[[], bool] = lambda: True
    ) -> None:
        self.plan, self._instruments, self._ready = plan, instruments, ready
        self.warm: list[Step] = []
        self.timed: list[Step] = []
        self.drained, self.profiled = 0.0, 0
        self.profile: TorchProfile | None = None
        self.note = ""
        self._phase: Literal["warmup", "profiled", "timed", "done"] = "warmup"
        self._first, self._wait, self._since = False, 0.0, 0.0
        self._working = False

    @property
    def done(self) -> bool:
        return self._phase == "done"

    def begin_epoch(self, make: Callable[[], Iterator[T]]) -> Iterator[T]:
        """Return the iterator of a new epoch.

        The time to create the iterator is added to the wait for the first batch.
        """
        since = self._instruments.clock()
        batches = make()
        self._first, self._wait = True, self._instruments.clock() - since
        return batches

    def request(self) -> None:
        now = self._instruments.clock()
        if self._working:
            self._close(now)
        self._advance()
        self._since = self._instruments.clock()

    def receive(self) -> None:
        now = self._instruments.clock()
        self._wait += now - self._since
        self._working, self._since = True, now
        if self._phase == "profiled" and self.profile is not None:
            self.profile.begin_step()

    def end_epoch(self) -> None:
        self._drain()
        if self._phase == "profiled":
            self._stop_profile()

    def leave(self) -> None:
        """Record that the loop ended in the middle of a step, and discard that step."""
        if self._phase == "profiled" and self.profile is not None:
            if self._working:
                self.profile.end_step()
                self.profiled += 1  # the profile contains its kernels
            self._stop_profile()
        self._working = False

    def gpu_step(self) -> tuple[GpuStep | None, str]:
        """Return the GPU's mean work per step, or None and the reason."""
        if self.profile is None:
            return None, self.note
        events = self.profile.events()
        if not any(event.name == BODY for event in events):
            return None, "the loop's own profiler took over while steps were profiled"
        memory, used = gpu_memory()
        gpu = summarize(events, self.profiled, memory=memory, used=used)
        return gpu, "" if gpu else f"{self.profiled} profiled steps launched nothing on it"

    def _close(self, now: float) -> None:
        step = Step(self._wait, now - self._since, self._first)
        self._first, self._wait, self._working = False, 0.0, False
        if self._phase == "profiled" and self.profile is not None:
            self.profile.end_step()
            self.profiled += 1
        elif self._phase == "timed":
            self.timed.append(step)
        elif self._phase == "warmup":
            self.warm.append(step)

    def _advance(self) -> None:
        """Begin the next phase if all steps of the current phase are complete."""
        if self._phase == "warmup" and len(self.warm) >= self.plan.warmup and self._ready():
            self._start_profile()
        if self._phase == "profiled" and self.profiled >= self.plan.profiled:
            self._stop_profile()
        if self._phase == "timed" and len(self.timed) == self.plan.steps:
            self._drain()
            self._phase = "done"

    def _start_profile(self) -> None:
        profile = self._instruments.profile()
        if isinstance(profile, str):
            self.note = profile
            self._start_timing()
        else:
            self.profile, self._phase = profile, "profiled"

    def _stop_profile(self) -> None:
        assert self.profile is not None
        self._instruments.synchronize()
        self.profile.stop()
        if self.profiled:
            self._start_timing()
        else:  # the epoch ended before one step was profiled: profile the next epoch
            self.profile, self._phase = None, "warmup"

    def _start_timing(self) -> None:
        self._instruments.synchronize()  # earlier work must not be part of a timed step
        self._phase = "timed"

    def _drain(self) -> None:
        if self._phase == "timed":
            since = self._instruments.clock()
            self._instruments.synchronize()
            self.drained += self._instruments.clock() - since


BODY = "aisp.body"
"""The profiler annotation around a step's work, from receiving a batch to requesting the next."""
ITEM, COPY = "aten::_local_scalar_dense", "aten::copy_"
"""The operator that `.item()`, `float()` and `bool()` call, and the operator that copies."""
BLOCKS = re.compile(r"\w*Synchronize|cudaMemcpy(Async)?")
"""CUDA calls in which the host waits. Asynchronous copies wait if the memory is not pinned."""
FUSIBLE = re.compile(r"elementwise|reduce_kernel|multi_tensor_apply|layer_norm|softmax", re.I)
"""PyTorch's memory-bound kernels, which a compiler can fuse."""


class Event(NamedTuple):
    """A profiler event, with times in seconds. An annotation only marks a time span."""

    name: str
    start: float
    end: float
    on_gpu: bool = False
    annotation: bool = False


class TorchProfile:
    """Profiles steps with torch.profiler. Creating the object starts the profiler.

    The profiler records operators as well as the GPU's work, because only the operators show
    whether `.item()` or something else made the host wait.
    """

    def __init__(self, *, gpu: bool) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
        self._profiler = profile(activities=activities)
        self._lost = False
        self._step = ExitStack()
        self._profiler.start()

    def begin_step(self) -> None:
        from torch.profiler import record_function

        self._step.enter_context(record_function(BODY))

    def end_step(self) -> None:
        self._step.close()

    def stop(self) -> None:
        try:
            self._profiler.stop()
        except RuntimeError:  # the loop started its own profiler, too (torch 2.13 does not raise)
            self._lost = True

    def events(self) -> list[Event]:
        events = [] if self._lost else self._profiler.events() or []
        return [
            Event(
                str(event.name),
                event.time_range.start * 1e-6,
                event.time_range.end * 1e-6,
                event.device_type.name == "CUDA",
                bool(event.is_user_annotation),
            )
            for event in events
        ]


@dataclass(frozen=True)
class GpuStep:
    """The GPU's work per step: means over `steps` profiled steps. Times are in seconds.

    Attributes:
        busy: the time during which the GPU ran at least one kernel, copy or fill.
        kernels: the time during which the GPU ran at least one kernel.
        copies: the time during which the GPU ran at least one copy.
        uploads: the time during which the GPU copied from host memory and ran no kernel.
        pageable: the part of `uploads` during which the host memory was not pinned.
        stalls: the time in which the host waited for the GPU during the step's work.
        item, copy: the parts of `stalls` in `.item()` and in copies.
        fusible: the time in elementwise, reduction and normalization kernels of PyTorch.
        launches, items: the number of kernels, and the number of `.item()` calls.
        memory: the GPU's memory in bytes, or 0 if unknown.
        used: the most bytes that PyTorch reserved, or 0 if unknown.
    """

    steps: int
    busy: float = 0.0
    kernels: float = 0.0
    copies: float = 0.0
    uploads: float = 0.0
    pageable: float = 0.0
    stalls: float = 0.0
    item: float = 0.0
    copy: float = 0.0
    fusible: float = 0.0
    launches: float = 0.0
    items: float = 0.0
    memory: int = 0
    used: int = 0


def gpu_memory() -> tuple[int, int]:
    """Return the GPU's memory and PyTorch's peak reserved memory in bytes, or two zeros."""
    import torch

    if not torch.cuda.is_initialized():
        return 0, 0
    return torch.cuda.mem_get_info()[1], torch.cuda.max_memory_reserved()


def summarize(
    events: Sequence[Event], steps: int, *, memory: int = 0, used: int = 0
) -> GpuStep | None:
    """Return the GPU's work per step, averaged over `steps`, or None if the GPU did nothing."""
    work = [e for e in events if e.on_gpu and not e.annotation]
    host = [e for e in events if not e.on_gpu]
    if not work:
        return None
    kernels = [e for e in work if not e.name.startswith(("Memcpy", "Memset"))]
    copies = [e for e in work if e.name.startswith("Memcpy")]
    waits = _inside(
        [e for e in host if BLOCKS.fullmatch(e.name)], [e for e in host if e.name == BODY]
    )
    items = [e for e in host if e.name == ITEM]
    # The waits in `item` and `copy` do not overlap: .item() does not call aten::copy_, and
    # float(x.cpu()) waits only in the copy.
    return GpuStep(
        steps,
        busy=_seconds(work) / steps,
        kernels=_seconds(kernels) / steps,
        copies=_seconds(copies) / steps,
        uploads=_exposed([e for e in copies if "HtoD" in e.name], kernels) / steps,
        pageable=_exposed([e for e in copies if "(Pageable ->" in e.name], kernels) / steps,
        stalls=_seconds(waits) / steps,
        item=_seconds(_inside(waits, items)) / steps,
        copy=_seconds(_inside(waits, [e for e in host if e.name == COPY])) / steps,
        fusible=_seconds([e for e in kernels if FUSIBLE.search(e.name)]) / steps,
        launches=len(kernels) / steps,
        items=len(items) / steps,
        memory=memory,
        used=used,
    )


def _inside(events: Iterable[Event], outer: Sequence[Event]) -> list[Event]:
    """Return the `events` that start and end within a single event of `outer`."""
    return [e for e in events if any(o.start <= e.start and e.end <= o.end for o in outer)]


def _seconds(events: Iterable[Event]) -> float:
    return union((e.start, e.end) for e in events)


def _exposed(copies: Sequence[Event], kernels: Sequence[Event]) -> float:
    """Return the seconds in which a copy but no kernel was running."""
    return _seconds([*copies, *kernels]) - _seconds(kernels)
