"""Where the time of a loop's steps goes: the figures, as lines and as plain types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median
from typing import Any

from ..results.row import duration
from ..util.cli_result import columns
from .stages import Stage
from .steps import Gpu, Step


@dataclass(frozen=True)
class Loader:
    """What batches come from.

    Attributes:
        name: its class; cores: how many its workers may use.
        batch: samples a batch, or None for unknown.
        workers, pinned, persistent: of a DataLoader, None where it is none.
    """

    name: str
    cores: int
    batch: int | None = None
    workers: int | None = None
    pinned: bool | None = None
    persistent: bool | None = None

    def __str__(self) -> str:
        if self.workers is None:
            return self.name
        pinned = ", pinned" if self.pinned else ""
        return f"{self.name} (batch {self.batch}, {self.workers} workers{pinned})"


@dataclass(frozen=True)
class Breakdown:
    """The steps of one loop and what they were for host and GPU.

    Attributes:
        name: the script's, or the loader's; device: the GPU, or the CPU without one.
        loader: None where steps were told by the optimizer, and what they waited for is unknown.
        steps, warm: those that count, and those before them.
        drained: seconds that the GPU still worked after the last step of each epoch, in total.
        gpu: a step on the GPU, or None, and `note` why.
        stages: of loading a batch, the slowest first.
    """

    name: str
    device: str
    loader: Loader | None
    steps: tuple[Step, ...]
    warm: tuple[Step, ...] = ()
    drained: float = 0.0
    gpu: Gpu | None = None
    note: str = ""
    stages: tuple[Stage, ...] = ()

    @cached_property
    def step(self) -> float:
        """Seconds a step."""
        return self.wait + self.body + self.drain

    @cached_property
    def wait(self) -> float:
        """Seconds a step that the loop waits for its batch."""
        return sum(step.wait for step in self.steps) / len(self.steps)

    @cached_property
    def body(self) -> float:
        """Seconds a step between a batch and the next request."""
        return sum(step.body for step in self.steps) / len(self.steps)

    @cached_property
    def drain(self) -> float:
        """Seconds a step that the GPU needs on top: the host had run ahead of it."""
        return self.drained / len(self.steps)

    @cached_property
    def starts(self) -> float:
        """Seconds a step of `wait` that the first batches of epochs took longer than the others."""
        usual = [step.wait for step in self.steps if not step.first]
        late = [step.wait for step in self.steps if step.first]
        if not usual:
            return 0.0
        return sum(max(0.0, wait - median(usual)) for wait in late) / len(self.steps)

    @cached_property
    def stalls(self) -> float:
        """Seconds a step in which the host waits for the GPU; 0 without one."""
        return 0.0 if self.gpu is None else min(self.gpu.stalls, self.body)

    @cached_property
    def host(self) -> float:
        """Seconds a step of Python and launching; on a CPU of the operators, too."""
        return self.body - self.stalls

    @cached_property
    def idle(self) -> float:
        """Seconds a step in which the GPU has nothing to do; without one, the whole step."""
        return self.step if self.gpu is None else max(0.0, self.step - self.gpu.busy)

    def share(self, seconds: float) -> float:
        """Return what part of a step `seconds` are."""
        return seconds / self.step if self.step else 0.0

    def rows(self) -> dict[str, float]:
        """Return seconds a step by what they were spent on: what adds up, then the GPU's."""
        host = {"host": self.host}
        if self.loader is not None:
            host = {"data": self.wait, **host}
        if self.gpu is None:
            return host
        gpu = {"GPU busy": self.gpu.busy, "kernels": self.gpu.kernels, "copies": self.gpu.copies}
        return {**host, "stalls": self.stalls, "drain": self.drain, **gpu, "GPU idle": self.idle}

    def lines(self) -> list[str]:
        """Return what to print."""
        return [*self._head(), "", *self._table(), *self._stages()]

    def _head(self) -> list[str]:
        batches = "steps of the optimizer" if self.loader is None else f"steps of {self.loader}"
        early = sum(step.wait + step.body for step in self.warm)
        warm = f", after {len(self.warm)} of warm-up in {duration(early)}" if self.warm else ""
        profiled = (
            f"GPU: no figures: {self.note}"
            if self.gpu is None
            else f"GPU: {self.gpu.steps} other steps under torch.profiler,"
            f" {self.gpu.launches:.4g} kernels and {self.gpu.items:.4g} .item() a step"
        )
        return [f"{self.name} on {self.device}: {len(self.steps)} {batches}{warm}", profiled]

    def _table(self) -> list[str]:
        count = len(self.steps)
        rows = {"step": self.step, **self.rows()}
        cells = [
            (self._meaning(name), *self._cells(seconds), duration(seconds * count))
            for name, seconds in rows.items()
        ]
        return columns([("", "a step", "share", "in total"), *cells])

    def _cells(self, seconds: float) -> tuple[str, str]:
        return duration(seconds), f"{self.share(seconds):.0%}"

    def _meaning(self, name: str) -> str:
        host = "Python and operators" if self.gpu is None else "Python and launching"
        host += "; data too, which nobody was seen to ask for" if self.loader is None else ""
        said = {
            "data": "waiting for the next batch",
            "host": host,
            "stalls": "the host waits for the GPU",
            "drain": "the GPU still works after an epoch",
        }
        return f"{name}: {said[name]}" if name in said else name

    def _stages(self) -> list[str]:
        if self.loader is None or self.loader.workers is None:
            return []
        if not self.stages:
            return ["", "loading: nothing was timed: its workers ran before the watch began"]
        where = f", summed over {self.loader.workers} workers" if self.loader.workers else ""
        rows = [(s.name, f"{s.calls:.4g}", duration(s.seconds)) for s in self._all_stages()]
        return ["", *columns([("loading" + where, "calls a batch", "a batch"), *rows])]

    def _all_stages(self) -> Sequence[Stage]:
        """Return the stages, and what else there is where the loop loads its batches itself."""
        rest = self.wait - sum(stage.seconds for stage in self.stages)
        if self.loader is None or self.loader.workers or rest <= 0:
            return self.stages
        return [*self.stages, Stage("the rest", 1, rest)]

    def to_json(self) -> dict[str, Any]:
        """Return plain types, times in seconds: means a step, totals, and every step."""
        rows = {"step": self.step, **self.rows()}
        count = len(self.steps)
        table = {
            name: {"a_step": s, "share": self.share(s), "total": s * count}
            for name, s in rows.items()
        }
        return {**asdict(self), "rows": table}
