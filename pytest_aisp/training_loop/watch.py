"""What a training loop waits for: data, Python, the GPU, or itself.

watch = bottleneck(loader)
for batch in watch:
    ...
print(watch.report())
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from ..util.cli_result import CliError
from ..util.device import cores_here
from . import advice
from .breakdown import Breakdown, Loader
from .stages import Stages
from .steps import BODY, Event, Gpu, Instruments, Loop, Plan, Stretch, summarize

T = TypeVar("T")


def bottleneck(
    loader: Iterable[T],
    *,
    steps: int | None = None,
    warmup: int = 5,
    profiled: int = 10,
) -> Watch[T]:
    """Return `loader`, watched: iterate it instead, as often as you like, then ask for the report.

    A step is what happens between one request for a batch and the next. The loop itself is not
    changed: it gets the same batches in the same order. The transforms and the collate function
    of a `torch.utils.data.DataLoader` are replaced by timed ones while it is iterated.

    Args:
        loader: any iterable; of a DataLoader, the transforms are timed, too.
        steps: how many steps to time at most; all of them by default.
        warmup: how many to leave out first.
        profiled: how many after these run under torch.profiler, where a GPU is used.
    """
    return Watch(loader, Plan(warmup, profiled, steps))


class Watch(Generic[T]):
    """An iterable that measures the loop around it."""

    def __init__(
        self, loader: Iterable[T], plan: Plan, instruments: Instruments | None = None
    ) -> None:
        self.loader = loader
        self._loop = Loop(plan, instruments or here())
        self._stages = Stages(loader) if is_loader(loader) else None

    def __iter__(self) -> Iterator[T]:
        with self._stages.attached() if self._stages else contextlib.nullcontext():
            batches = Batches(self._loop, lambda: iter(self.loader))
            try:
                yield from batches
            finally:
                batches.close()

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def measured(self) -> Breakdown:
        """Return the figures.

        Raises:
            Unanswerable: where no step was timed yet.
        """
        return breakdown(type(self.loader).__name__, self._loop, self.loader, self._stages)

    def report(self) -> str:
        """Return the figures and the advice as text.

        Raises:
            Unanswerable: where no step was timed yet.
        """
        return "\n".join(text(self.measured()))

    def to_json(self) -> dict[str, Any]:
        """Return the figures and the advice as plain types, times in seconds.

        Raises:
            Unanswerable: where no step was timed yet.
        """
        return plain(self.measured())


class Batches(Iterator[T]):
    """The iterator of one epoch, which tells its loop when a batch is asked for and there."""

    def __init__(self, loop: Loop, make: Callable[[], Iterator[T]]) -> None:
        self._loop = loop
        self._batches: Iterator[T] = loop.begin(make)

    def __next__(self) -> T:
        self._loop.asked()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._loop.ended()
            raise
        self._loop.got()
        return batch

    def close(self) -> None:
        """Forget the step that was begun."""
        self._loop.left()


def is_loader(loader: object) -> bool:
    """Return whether `loader` is a DataLoader; PyTorch is not imported to find out."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(loader, data.DataLoader)


def breakdown(name: str, loop: Loop, loader: Any, stages: Stages | None) -> Breakdown:
    """Return the figures of one loop; `loader` is None where the optimizer told its steps.

    Raises:
        Unanswerable: where no step was timed.
    """
    if not loop.timed:
        raise CliError(too_few(loop))
    gpu, note = on_gpu(loop)
    return Breakdown(
        name,
        device(),
        None if loader is None else described(loader),
        tuple(loop.timed),
        tuple(loop.warm),
        loop.drained,
        gpu,
        note,
        stages.read() if stages else (),
    )


def on_gpu(loop: Loop) -> tuple[Gpu | None, str]:
    """Return what a step was for the GPU, or None and why."""
    if loop.stretch is None:
        return None, loop.note
    events = loop.stretch.events()
    if not any(event.name == BODY for event in events):
        return None, "the loop's own profiler took over while steps were profiled"
    memory, used = memory_of_gpu()
    found = summarize(events, loop.profiled, memory=memory, used=used)
    return found, "" if found else f"{loop.profiled} profiled steps launched nothing on it"


def too_few(loop: Loop) -> str:
    """Return why there are no figures, and what to do."""
    seen = len(loop.warm) + loop.profiled
    plan = loop.plan
    return (
        f"the loop ended after {seen} steps, and none was left to time: the first {plan.warmup}"
        f" are warm-up, {plan.profiled} more are profiled where there is a GPU\n"
        "let it run for longer, or ask for fewer: --warmup=1 --profiled=1,"
        " or bottleneck(loader, warmup=1, profiled=1)"
    )


def described(loader: Any) -> Loader:
    """Return what there is to know of what batches come from."""
    cores = len(cores_here())
    name = type(loader).__name__
    if not is_loader(loader):
        return Loader(name, cores)
    return Loader(
        name,
        cores,
        loader.batch_size,
        loader.num_workers,
        loader.pin_memory,
        loader.persistent_workers,
    )


def text(found: Breakdown) -> list[str]:
    """Return the figures and the advice as lines."""
    return [*found.lines(), *advice.lines(found)]


def plain(found: Breakdown) -> dict[str, Any]:
    """Return the figures and the advice as plain types."""
    return {**found.to_json(), "advice": [asdict(a) for a in advice.advise(found)]}


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
    from ..util.device import cpu_machine

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
