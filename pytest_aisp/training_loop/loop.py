"""The steps of a training loop, as a clock sees them: waiting for a batch, then working on it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..timing.kernel_profile import union


@dataclass(frozen=True)
class Plan:
    """How many steps serve what; the profiled ones come between warm-up and timed ones.

    Attributes:
        warmup: steps that are not measured: compilation, allocation, starting workers.
        profiled: steps under the profiler, on a GPU alone.
        steps: steps timed at most, or None for all the others.
    """

    warmup: int = 5
    profiled: int = 10
    steps: int | None = None


@dataclass(frozen=True)
class Step:
    """One step: seconds until its batch was there, seconds until the next one was asked for.

    Attributes:
        first: whether its batch was the first of an epoch.
    """

    wait: float
    body: float
    first: bool = False


class Stretch(Protocol):
    """Some steps under a profiler that is already running."""

    def body(self) -> None:
        """Mark that a batch is there and the step's work begins."""

    def rest(self) -> None:
        """Mark that the step's work is done."""

    def stop(self) -> None:
        """Wait for the GPU and stop the profiler."""

    def events(self) -> list[Event]:
        """Return what was seen."""


@dataclass(frozen=True)
class Instruments:
    """What a loop is measured with.

    Attributes:
        clock: the host's seconds.
        drain: waits until the GPU has done all its work.
        stretch: starts the profiler, or says why there is nothing to profile.
    """

    clock: Callable[[], float]
    drain: Callable[[], None]
    stretch: Callable[[], Stretch | str]


class Loop:
    """One loop, told when it asks for a batch and when it has it.

    Attributes:
        warm, timed: the steps of warm-up, and those that count.
        drained: seconds that the GPU worked on after the last timed step of an epoch.
        stretch, profiled: the profiler's steps and how many, or `note`: why there are none.
    """

    def __init__(
        self, plan: Plan, instruments: Instruments, *, ready: Callable[[], bool] = lambda: True
    ) -> None:
        self.plan, self._with, self._ready = plan, instruments, ready
        self.warm: list[Step] = []
        self.timed: list[Step] = []
        self.drained, self.profiled = 0.0, 0
        self.stretch: Stretch | None = None
        self.note = ""
        self._phase = "warmup"
        self._first, self._wait, self._since = False, 0.0, 0.0
        self._working = False

    @property
    def done(self) -> bool:
        """Whether as many steps were timed as planned."""
        return self._phase == "done"

    def begin(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the iterator of a new epoch; what making it takes, its first batch takes."""
        since = self._with.clock()
        made = make()
        self._first, self._wait = True, self._with.clock() - since
        return made

    def asked(self) -> None:
        """Note that the next batch is asked for: the step before is over."""
        now = self._with.clock()
        if self._working:
            self._close(now)
        self._turn()
        self._since = self._with.clock()

    def got(self) -> None:
        """Note that the batch is there."""
        now = self._with.clock()
        self._wait += now - self._since
        self._working, self._since = True, now
        if self._phase == "profiled" and self.stretch is not None:
            self.stretch.body()

    def ended(self) -> None:
        """Note that there was no further batch."""
        self._drain()
        if self._phase == "profiled":
            self._unprofile()

    def left(self) -> None:
        """Note that the loop was left within a step, which is not counted."""
        if self._phase == "profiled" and self.stretch is not None:
            if self._working:
                self.stretch.rest()
                self.profiled += 1  # its kernels are in the profile
            self._unprofile()
        self._working = False

    def _close(self, now: float) -> None:
        step = Step(self._wait, now - self._since, self._first)
        self._first, self._wait, self._working = False, 0.0, False
        if self._phase == "profiled" and self.stretch is not None:
            self.stretch.rest()
            self.profiled += 1
        elif self._phase == "timed":
            self.timed.append(step)
        elif self._phase == "warmup":
            self.warm.append(step)

    def _turn(self) -> None:
        """Begin the next phase where this one has all its steps."""
        if self._phase == "warmup" and len(self.warm) >= self.plan.warmup and self._ready():
            self._profile()
        if self._phase == "profiled" and self.profiled >= self.plan.profiled:
            self._unprofile()
        if self._phase == "timed" and len(self.timed) == self.plan.steps:
            self._drain()
            self._phase = "done"

    def _profile(self) -> None:
        opened = self._with.stretch()
        if isinstance(opened, str):
            self.note = opened
            self._time()
        else:
            self.stretch, self._phase = opened, "profiled"

    def _unprofile(self) -> None:
        assert self.stretch is not None
        self.stretch.stop()
        if self.profiled:
            self._time()
        else:  # the epoch ended at once: the next one is profiled
            self.stretch, self._phase = None, "warmup"

    def _time(self) -> None:
        self._with.drain()  # what warm-up left in the GPU's queue is nobody's step
        self._phase = "timed"

    def _drain(self) -> None:
        if self._phase == "timed":
            since = self._with.clock()
            self._with.drain()
            self.drained += self._with.clock() - since


BODY = "aisp.body"
"""The annotation around a step's work, from its batch to the next request."""
ITEM, COPY = "aten::_local_scalar_dense", "aten::copy_"
"""Operators: `.item()`, `float()`, `bool()` and the like; and every copy."""
BLOCKS = re.compile(r"\w*Synchronize|cudaMemcpy(Async)?")
"""Calls of the runtime and the driver in which the host waits; a copy of pageable memory too."""
FUSIBLE = re.compile(r"elementwise|reduce_kernel|multi_tensor_apply|layer_norm|softmax", re.I)
"""PyTorch's kernels that move more than they compute: what a fusing compiler merges."""


class Event(NamedTuple):
    """One thing that the profiler saw, in seconds; an annotation is no work."""

    name: str
    start: float
    end: float
    on_gpu: bool = False
    annotation: bool = False


@dataclass(frozen=True)
class Gpu:
    """What a step is for the GPU, in seconds a step, the mean of `steps` profiled ones.

    Attributes:
        busy: at least one kernel, copy or fill was at work; kernels, copies: one of these was.
        uploads: copies from the host's memory while no kernel was at work; pageable: those from
            memory that is not pinned.
        stalls: the host waited for the GPU within the step's work; item, copy: in `.item()` and
            in copies.
        fusible: elementwise, reducing and normalizing kernels of PyTorch were at work.
        launches, items: how many kernels, and how many `.item()`.
        memory, used: bytes of the GPU, and the most that PyTorch had reserved; 0 for unknown.
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


Span = tuple[float, float]


def summarize(events: Iterable[Event], steps: int, *, memory: int = 0, used: int = 0) -> Gpu | None:
    """Return what `steps` steps were for the GPU, or None where it had nothing to do."""
    seen = list(events)
    work = [e for e in seen if e.on_gpu and not e.annotation]
    host = [e for e in seen if not e.on_gpu]
    if not work:
        return None
    kernels = [e for e in work if not e.name.startswith(("Memcpy", "Memset"))]
    copies = [e for e in work if e.name.startswith("Memcpy")]
    return Gpu(
        steps,
        busy=_seconds(work, steps),
        kernels=_seconds(kernels, steps),
        copies=_seconds(copies, steps),
        uploads=_exposed([e for e in copies if "HtoD" in e.name], kernels, steps),
        pageable=_exposed([e for e in copies if "(Pageable ->" in e.name], kernels, steps),
        fusible=_seconds([e for e in kernels if FUSIBLE.search(e.name)], steps),
        launches=len(kernels) / steps,
        items=sum(e.name == ITEM for e in host) / steps,
        memory=memory,
        used=used,
        **_waits(host, steps),
    )


def _waits(host: Sequence[Event], steps: int) -> dict[str, float]:
    bodies = _spans(e for e in host if e.name == BODY)
    blocks = inside(_spans(e for e in host if BLOCKS.fullmatch(e.name)), bodies)
    item = inside(blocks, _spans(e for e in host if e.name == ITEM))
    # .item() copies too, but not through aten::copy_; float(x.cpu()) waits in the copy alone.
    copy = inside(blocks, _spans(e for e in host if e.name == COPY))
    named = {"stalls": blocks, "item": item, "copy": copy}
    return {name: union(spans) / steps for name, spans in named.items()}


def inside(spans: Iterable[Span], outer: Iterable[Span]) -> list[Span]:
    """Return those `spans` that lie in one of `outer`."""
    around = list(outer)
    return [s for s in spans if any(start <= s[0] and s[1] <= end for start, end in around)]


def _spans(events: Iterable[Event]) -> list[Span]:
    return [(e.start, e.end) for e in events]


def _seconds(events: Iterable[Event], steps: int) -> float:
    return union(_spans(events)) / steps


def _exposed(copies: Sequence[Event], kernels: Sequence[Event], steps: int) -> float:
    return _seconds([*copies, *kernels], steps) - _seconds(kernels, steps)
