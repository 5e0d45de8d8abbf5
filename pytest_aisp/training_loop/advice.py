"""What to change in a loop, by how much of a step it can win at most, as measured.

No host-side change makes a step shorter than the GPU is busy in it, so each is held against the
time that the GPU is idle. Wins overlap: they do not add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..results.row import duration
from ..util.cli_result import size_text
from .breakdown import Breakdown, Loader

NOTICEABLE = 0.05
"""The share of a step below which a change is not worth a line."""
SMALL = 0.5
"""The part of the GPU's memory below which there is room for a batch twice as large."""


@dataclass(frozen=True)
class Advice:
    """One change: the seconds and the share of a step it can win at most, and why."""

    seconds: float
    share: float
    text: str

    def __str__(self) -> str:
        return f"{self.share:4.0%}  {self.text}"


def advise(found: Breakdown) -> list[Advice]:
    """Return the changes that can win a noticeable share, the largest first."""
    every = (_data, _stage, _starts, _copies, _items, _other_stalls, _launches, _batch, _fusion)
    made = (Advice(s, found.share(s), text) for rule in every for s, text in rule(found))
    return sorted((a for a in made if a.share >= NOTICEABLE), key=lambda a: -a.seconds)


def lines(found: Breakdown) -> list[str]:
    """Return the advice as lines, or why there is none."""
    given = advise(found)
    if given:
        head = "What a change can win of a step at most (wins overlap, they do not add up):"
        return ["", head, *map(str, given)]
    busy = f"the step's own Python and operators take {found.share(found.host):.0%}"
    if found.gpu is not None:
        busy = f"the GPU is busy for {found.share(found.gpu.busy):.0%} of a step"
    reason = f"{busy}, no change that is known here can win {NOTICEABLE:.0%}"
    return ["", f"Nothing stands out: {reason}."]


Rule = Iterator[tuple[float, str]]


def _data(found: Breakdown) -> Rule:
    """Load batches in workers, or in more of them, until one is there when it is asked for."""
    loader, wait = found.loader, found.wait - found.starts
    if loader is None:
        return
    waits = f"the loop waits {duration(wait)} a step for its batch"
    if loader.workers is None:
        yield min(wait, found.idle), f"load ahead, in a DataLoader with workers: {waits}"
        return
    loading = loading_time(found)
    wanted = workers_for(found, loader)
    if wanted <= loader.workers:
        full = f"{loader.workers} workers on {loader.cores} cores are all there can be"
        yield min(wait, found.idle), f"load less or faster: {waits}, and {full}"
        return
    after = max(found.body + found.drain, loading / wanted)
    load = f"a batch takes {duration(loading)} to load, the work on it {duration(found.body)}"
    yield (
        min(wait, found.step - after, found.idle),
        f"num_workers={wanted} instead of {loader.workers}: {waits}; {load}",
    )


def loading_time(found: Breakdown) -> float:
    """Return the seconds that one process takes to load a batch, given that the loop waits."""
    workers = 0 if found.loader is None else found.loader.workers
    # Where workers cannot keep up, each has its next batch ready one step of all of them later.
    return workers * (found.step - found.starts) if workers else found.wait - found.starts


def workers_for(found: Breakdown, loader: Loader) -> int:
    """Return how many workers load as fast as the step works, and no more than there are cores."""
    work = found.body + found.drain
    enough = math.ceil(loading_time(found) / work) if work else loader.cores
    return max(1, min(enough, loader.cores))


def _stage(found: Breakdown) -> Rule:
    if not found.stages or found.loader is None:
        return
    slowest, workers = found.stages[0], found.loader.workers or 1
    seconds = min(slowest.seconds / workers, found.wait - found.starts, found.idle)
    whole = sum(stage.seconds for stage in found.stages)
    times = f"{duration(slowest.seconds)} a batch of the {duration(whole)} of all that is timed"
    ways = "make it cheaper, do it once and keep the result, or do it on whole batches"
    yield seconds, f"{slowest.name} is the slowest stage of loading, {times}: {ways}"


def _starts(found: Breakdown) -> Rule:
    if found.loader is None or not found.loader.workers or found.loader.persistent:
        return
    late = f"first batches of epochs come later than others by {duration(found.starts)} a step"
    yield min(found.starts, found.idle), f"persistent_workers=True: {late}"


def _copies(found: Breakdown) -> Rule:
    gpu = found.gpu
    if gpu is None:
        return
    seconds = min(max(gpu.uploads, gpu.copy), found.idle + gpu.uploads)
    if gpu.pageable:
        copied = f"{duration(gpu.pageable)} a step of copies from memory that is not pinned"
        how = "pin_memory=True and .to(device, non_blocking=True)"
        yield seconds, f"{how}: {copied}, the host waits {duration(gpu.copy)} in copies"
    else:
        waits = f"the host waits {duration(gpu.copy)} a step in copies"
        yield min(gpu.copy, found.idle), f"non_blocking=True where tensors are copied: {waits}"


def _items(found: Breakdown) -> Rule:
    gpu = found.gpu
    if gpu is None:
        return
    waits = f"{gpu.items:.4g} a step (float() and bool() too) wait {duration(gpu.item)}"
    yield (
        min(gpu.item, found.idle),
        f"fewer .item(): {waits}; keep losses on the GPU and read them every hundredth step",
    )


def _other_stalls(found: Breakdown) -> Rule:
    gpu = found.gpu
    if gpu is None:
        return
    other = max(0.0, found.stalls - gpu.item - gpu.copy)
    where = "in cudaStreamSynchronize and the like, outside .item() and copies"
    ways = "torch.cuda.synchronize(), nonzero() and boolean masks wait"
    yield min(other, found.idle), f"no other waiting: {duration(other)} a step {where}: {ways}"


def _launches(found: Breakdown) -> Rule:
    gpu = found.gpu
    if gpu is None or not gpu.launches:
        return
    one = duration(gpu.kernels / gpu.launches)
    idle = f"the GPU is idle for {found.share(found.idle):.0%} of a step"
    yield (
        min(found.host, found.idle),
        'a CUDA graph (torch.cuda.graph, or torch.compile with mode="reduce-overhead"):'
        f" the host takes {duration(found.host)} a step to launch {gpu.launches:.4g} kernels"
        f" of {one}, {idle}",
    )


def _batch(found: Breakdown) -> Rule:
    gpu = found.gpu
    if gpu is None or not gpu.memory or gpu.used > SMALL * gpu.memory:
        return
    room = f"{size_text(gpu.used)} of {size_text(gpu.memory)} of the GPU's memory are used"
    yield (
        min(found.host, found.idle) / 2,
        f"a batch twice as large: the host's {duration(found.host)} are paid once a batch, {room}",
    )


def _fusion(found: Breakdown) -> Rule:
    gpu = found.gpu
    if gpu is None or gpu.busy < found.idle:  # shorter kernels help where the GPU sets the pace
        return
    kernels = f"{duration(gpu.fusible)} a step in PyTorch's elementwise and reducing kernels"
    yield gpu.fusible, f"torch.compile, which merges them: {kernels}"
