"""Break the time of a loop's steps down by activity, and suggest changes.

A change on the host cannot make a step shorter than the GPU's busy time, so most changes save at
most the GPU's idle time. The savings of several changes overlap and do not add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median
from typing import TypeAlias

from ..results.row import duration
from ..util.cli_result import columns, size_text
from ..util.device import cores_here, cpu_machine
from .loop import GpuStep, Step
from .stages import Stage, is_dataloader


@dataclass(frozen=True)
class Loader:
    """The object that supplies the batches.

    Attributes:
        name: the name of the object's class.
        cores: the number of cores that the object's workers may use.
        batch: the number of samples per batch, or None if unknown.
        workers, pinned, persistent: the settings of a DataLoader, or None for other iterables.
    """

    name: str
    cores: int
    batch: int | None = None
    workers: int | None = None
    pinned: bool | None = None
    persistent: bool | None = None

    @classmethod
    def of(cls, loader: object) -> Loader:
        """Return the description of `loader`."""
        name, cores = type(loader).__name__, len(cores_here())
        if not is_dataloader(loader):
            return cls(name, cores)
        settings = (loader.num_workers, loader.pin_memory, loader.persistent_workers)
        return cls(name, cores, loader.batch_size, *settings)

    def __str__(self) -> str:
        if self.workers is None:
            return self.name
        pinned = ", pinned" if self.pinned else ""
        return f"{self.name} (batch {self.batch}, {self.workers} workers{pinned})"


def device_name() -> str:
    """Return the name of this process's GPU, or of its CPU if it uses no GPU."""
    import torch

    if torch.cuda.is_initialized():
        return torch.cuda.get_device_name()
    return cpu_machine().name


@dataclass(frozen=True)
class Breakdown:
    """The time of one loop's steps, by activity of the host and of the GPU.

    Properties that are times are means in seconds per step.

    Attributes:
        name: the name of the script or of the loader.
        device: the name of the GPU, or of the CPU if no GPU is used.
        loader: the loader, or None if calls of the optimizer separate the steps. Without a loader,
            the time spent waiting for data is not measured.
        steps, warm: the timed steps, and the warm-up steps before them.
        drained: the seconds that the GPU kept working after the last step of an epoch, summed over
            all epochs.
        gpu: the GPU's work in a step, or None for the reason that `note` gives.
        stages: the stages of loading a batch, the slowest first.
    """

    name: str
    device: str
    loader: Loader | None
    steps: tuple[Step, ...]
    warm: tuple[Step, ...] = ()
    drained: float = 0.0
    gpu: GpuStep | None = None
    note: str = ""
    stages: tuple[Stage, ...] = ()

    @property
    def step(self) -> float:
        return self.wait + self.body + self.drain

    @cached_property
    def wait(self) -> float:
        """The time that the loop waits for its batch."""
        return sum(step.wait for step in self.steps) / len(self.steps)

    @cached_property
    def body(self) -> float:
        """The time from receiving a batch to requesting the next one."""
        return sum(step.body for step in self.steps) / len(self.steps)

    @property
    def drain(self) -> float:
        """The time that the GPU keeps working after the host has ended an epoch's last step."""
        return self.drained / len(self.steps)

    @cached_property
    def starts(self) -> float:
        """The part of `wait` that comes from the slower first batch of an epoch."""
        usual = [step.wait for step in self.steps if not step.first]
        if not usual:
            return 0.0
        late = [step.wait - median(usual) for step in self.steps if step.first]
        return sum(max(0.0, seconds) for seconds in late) / len(self.steps)

    @property
    def stalls(self) -> float:
        """The time that the host waits for the GPU."""
        return 0.0 if self.gpu is None else min(self.gpu.stalls, self.body)

    @property
    def host(self) -> float:
        """The time of Python code and kernel launches, and without a GPU also of operators."""
        return self.body - self.stalls

    @property
    def idle(self) -> float:
        """The time during which the GPU has no work, or the whole step if no GPU is used."""
        return self.step if self.gpu is None else max(0.0, self.step - self.gpu.busy)

    def share(self, seconds: float) -> float:
        """Return `seconds` as a share of a step."""
        return seconds / self.step if self.step else 0.0

    def rows(self) -> dict[str, float]:
        """Return the seconds per step of each activity.

        The host's activities come first and add up to the step. The GPU's activities follow.
        """
        host = {"host": self.host}
        if self.loader is not None:
            host = {"data": self.wait, **host}
        if self.gpu is None:
            return host
        gpu = {"GPU busy": self.gpu.busy, "kernels": self.gpu.kernels, "copies": self.gpu.copies}
        return {**host, "stalls": self.stalls, "drain": self.drain, **gpu, "GPU idle": self.idle}

    def report(self) -> list[str]:
        """Return the figures and the advice as lines of text."""
        return [*self._head(), "", *self._table(), *self._stage_table(), "", *self._advice_lines()]

    def _head(self) -> list[str]:
        steps = _counted(len(self.steps), "optimizer step")
        if self.loader is not None:
            steps = f"{_counted(len(self.steps), 'step')} over {self.loader}"
        early = sum(step.wait + step.body for step in self.warm)
        if self.warm:
            warm_up = _counted(len(self.warm), "warm-up step")
            steps += f", after {warm_up} in {duration(early)}"
        gpu = f"GPU: no figures: {self.note}"
        if self.gpu is not None:
            gpu = f"GPU: {_counted(self.gpu.steps, 'more step')} under torch.profiler,"
            gpu += f" {self.gpu.launches:.4g} kernels and {self.gpu.items:.4g} .item() per step"
        return [f"{self.name} on {self.device}: {steps}", gpu]

    def _table(self) -> list[str]:
        host = "Python and operators" if self.gpu is None else "Python and kernel launches"
        meanings = {
            "data": "waiting for the next batch",
            "host": host + ("; loading data too" if self.loader is None else ""),
            "stalls": "the host waits for the GPU",
            "drain": "the GPU finishes after an epoch",
        }
        table = [("", "per step", "share", "total")]
        for name, seconds in {"step": self.step, **self.rows()}.items():
            label = f"{name}: {meanings[name]}" if name in meanings else name
            total = duration(seconds * len(self.steps))
            table.append((label, duration(seconds), f"{self.share(seconds):.0%}", total))
        return columns(table)

    def _stage_table(self) -> list[str]:
        if self.loader is None or self.loader.workers is None:
            return []
        if not self.stages:
            return ["", "loading: not timed, because the workers started before the measurement"]
        head = f"loading, summed over {self.loader.workers} workers"
        stages = list(self.stages)
        # without workers, the loop loads the data itself, so its wait is load time
        if not self.loader.workers:
            head = "loading"
            rest = self.wait - sum(stage.seconds for stage in stages)
            stages += [Stage("other", 1, rest)] if rest > 0 else []
        rows = [(stage.name, f"{stage.calls:.4g}", duration(stage.seconds)) for stage in stages]
        return ["", *columns([(head, "calls per batch", "time per batch"), *rows])]

    def _advice_lines(self) -> list[str]:
        if advice := advise(self):
            head = "The most that each change can save of a step (do not add overlapping savings):"
            return [head, *(f"{change.share:4.0%}  {change.text}" for change in advice)]
        reason = f"Python and operators in the step take {self.share(self.host):.0%}"
        if self.gpu is not None:
            reason = f"the GPU is busy for {self.share(self.gpu.busy):.0%} of a step"
        return [f"Nothing stands out: {reason}, and no known change can save {NOTICEABLE:.0%}."]

    def to_json(self) -> dict[str, object]:
        """Return the figures and the advice as plain types, with means, totals, and every step."""
        rows = {
            name: {"a_step": s, "share": self.share(s), "total": s * len(self.steps)}
            for name, s in {"step": self.step, **self.rows()}.items()
        }
        return {**asdict(self), "rows": rows, "advice": [asdict(a) for a in advise(self)]}


NOTICEABLE = 0.05
"""The smallest share of a step for which a change is listed."""
ROOM = 0.5
"""A batch twice as large fits if at most this share of the GPU's memory is used."""
Rule: TypeAlias = Iterator[tuple[float, str]]
"""The most seconds per step that each change can save, and advice as text."""


@dataclass(frozen=True)
class Advice:
    """A suggested change, and the largest share of a step that the change can save."""

    seconds: float
    share: float
    text: str


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def advise(breakdown: Breakdown) -> list[Advice]:
    """Return the changes that can save a noticeable share of a step, the largest share first."""
    rules = [*_loading(breakdown), *_gpu(breakdown)]
    every = [Advice(seconds, breakdown.share(seconds), text) for seconds, text in rules]
    return sorted((a for a in every if a.share >= NOTICEABLE), key=lambda a: -a.seconds)


def _loading(breakdown: Breakdown) -> Rule:
    """Yield the possible changes to the loader."""
    loader = breakdown.loader
    if loader is None:
        return
    wait = breakdown.wait - breakdown.starts
    waits = f"the loop waits {duration(wait)} per step for its batch"
    if loader.workers is None:
        yield min(wait, breakdown.idle), f"load ahead, in a DataLoader with workers: {waits}"
    else:
        yield _workers(breakdown, loader, loader.workers, wait, waits)
    if breakdown.stages:
        slowest, whole = breakdown.stages[0], sum(stage.seconds for stage in breakdown.stages)
        yield (
            min(slowest.seconds / (loader.workers or 1), wait, breakdown.idle),
            f"{slowest.name} is the slowest stage of loading, {duration(slowest.seconds)} of the"
            f" {duration(whole)} timed per batch: make it cheaper, cache its result, or apply it"
            " to whole batches",
        )
    if loader.workers and not loader.persistent:
        yield (
            min(breakdown.starts, breakdown.idle),
            "persistent_workers=True: the first batch of an epoch takes longer than the others,"
            f" which costs {duration(breakdown.starts)} per step",
        )


def _workers(
    breakdown: Breakdown, loader: Loader, workers: int, wait: float, waits: str
) -> tuple[float, str]:
    # Assume that the workers are too slow, so that all workers are always busy. Then one worker
    # needs the time of `workers` steps to load a batch.
    loading = workers * (breakdown.step - breakdown.starts) if workers else wait
    work = breakdown.body + breakdown.drain
    wanted = max(1, min(math.ceil(loading / work) if work else loader.cores, loader.cores))
    if wanted <= workers:
        limit = f"{loader.cores} cores have no room for more than {workers} workers"
        return min(wait, breakdown.idle), f"load less data, or load it faster: {waits}, and {limit}"
    return (
        min(wait, breakdown.step - max(work, loading / wanted), breakdown.idle),
        f"num_workers={wanted} instead of {workers}: {waits}; loading a batch takes"
        f" {duration(loading)}, working on it {duration(breakdown.body)}",
    )


def _gpu(breakdown: Breakdown) -> Rule:
    """Yield the possible changes to the work in a step."""
    gpu, idle = breakdown.gpu, breakdown.idle
    if gpu is None:
        return
    copying = f"the host waits {duration(gpu.copy)} per step in copies"
    if gpu.pageable:
        yield (
            min(max(gpu.uploads, gpu.copy), idle + gpu.uploads),
            "pin_memory=True and .to(device, non_blocking=True): copies from unpinned memory take"
            f" {duration(gpu.pageable)} per step, and {copying}",
        )
    else:
        yield min(gpu.copy, idle), f"non_blocking=True where tensors are copied: {copying}"
    yield (
        min(gpu.item, idle),
        f"fewer .item() calls: {gpu.items:.4g} per step, float() and bool() included, wait"
        f" {duration(gpu.item)}; keep losses on the GPU and read them every 100 steps",
    )
    other = max(0.0, breakdown.stalls - gpu.item - gpu.copy)
    yield (
        min(other, idle),
        f"fewer other waits: {duration(other)} per step in cudaStreamSynchronize and similar calls,"
        " which torch.cuda.synchronize(), nonzero() and boolean masks make",
    )
    if gpu.launches:
        yield (
            min(breakdown.host, idle),
            'a CUDA graph (torch.cuda.graph, or torch.compile with mode="reduce-overhead"): the'
            f" host takes {duration(breakdown.host)} per step to launch {gpu.launches:.4g} kernels"
            f" of {duration(gpu.kernels / gpu.launches)}, and the GPU is idle for"
            f" {breakdown.share(idle):.0%} of a step",
        )
    if gpu.memory and gpu.used <= ROOM * gpu.memory:
        yield (
            min(breakdown.host, idle) / 2,
            f"a batch twice as large: the host takes {duration(breakdown.host)} for a batch of any"
            f" size, and only {size_text(gpu.used)} of the GPU's {size_text(gpu.memory)} are used",
        )
    if gpu.busy >= idle:  # shorter kernels help only if the GPU limits the speed
        yield (
            gpu.fusible,
            "torch.compile, which fuses kernels: PyTorch's elementwise and reduction kernels take"
            f" {duration(gpu.fusible)} per step",
        )
