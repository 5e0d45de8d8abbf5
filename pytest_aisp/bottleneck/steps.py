"""The steps of a training loop, as a clock sees them: waiting for a batch, then working on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from .stretch import Event


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
