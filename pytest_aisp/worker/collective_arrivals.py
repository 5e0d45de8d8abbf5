"""Record when each rank arrives at its collectives and when they end, with torch's profiler.

The profiler records every collective, including the collectives of DDP and FSDP. With Gloo, a
collective lasts from the call to the end of the transfer. With NCCL, a collective lasts as long as
its kernel, which starts when the rank's stream reaches the collective, and ends when the data have
arrived. The profiler puts the times of kernels on the host's clock, with an error that differs
between ranks. An all-reduce before each call ends on all GPUs almost at once, and shows the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from ..checking.inputs import BoundSide, InputPool, one_slot
from ..page.pair import PageError
from ..results.messages import DiagnoseTask
from ..timing.collectives import OPS, known_collective, loop_of_all_reduces
from ..util.device_state import no_gc, synchronizer
from ..util.process_group import current_group
from .collective_events import END, RANGE, RECEIVED, SENT, START, Operation, operations
from .loader import TaskContext, seed_of

WARMUP, CALLS = 3, 30
"""Numbers of calls before the recording, and of recorded calls."""
LOOP_SIZES = (4 << 10, 256 << 10, 4 << 20)
"""Bytes of the all-reduces of the loop that is recorded if no case is given."""
QUEUE_CYCLES = 10_000_000
"""The clock cycles (5 ms) for which GPUs are kept busy while the host queues a call of the loop."""


class Meeting(Struct, frozen=True):
    """One collective on all ranks.

    Attributes:
        name, nbytes: the name and the bytes of its operations.
        arrived, ended: seconds by rank.
        blocked: the seconds by rank, since the rank's last collective, of waiting for data that no
            other rank had begun to send.
    """

    name: str
    nbytes: int
    arrived: Sequence[float]
    ended: Sequence[float]
    blocked: Sequence[float]

    @property
    def spread(self) -> float:
        """Seconds between the first and the last arrival."""
        return max(self.arrived) - min(self.arrived)

    @property
    def transfer(self) -> float:
        """Seconds from the last arrival to the last end."""
        return max(self.ended) - max(self.arrived)

    @property
    def key(self) -> str:
        return f"{self.name} {self.nbytes}"


Call = Sequence[Meeting]
"""The collectives of one call, in order."""


class SideArrivals(Struct, frozen=True):
    """The recorded calls of one side, and the time of each collective while nothing else runs.

    Attributes:
        alone: transfer seconds of a call's k-th collective by itself, or None if unknown.
    """

    calls: Sequence[Call]
    alone: Sequence[float | None]


class DiagnoseResult(Struct, frozen=True):
    """The result of a `DiagnoseTask`.

    Attributes:
        sides: the arrivals of each side, by the side's name.
        clock_error: seconds by which arrivals on two ranks may be off relative to each other.
    """

    sides: Mapping[str, SideArrivals]
    clock_error: float


def diagnose(task: DiagnoseTask, progress: Callable[[str], object]) -> DiagnoseResult:
    """Record both sides of the case, or a loop of all-reduces if there is no page.

    Raises:
        PageError: a side makes no collective, or the ranks make different ones.
    """
    if not task.function:
        loop = loop_of_all_reduces(LOOP_SIZES, task.device)
        return _record_sides([loop], task.device, progress, compare=False)
    context = TaskContext(task)
    seed = seed_of(task, task.kind)
    pool = InputPool(context.pair, dict(task.size), task.device, seed, task.seed)
    with one_slot(pool), no_gc():
        bound = (pool.bind(side) for side, _ in context.sides)
        return _record_sides(bound, task.device, progress, compare=True)


def _record_sides(
    sides: Iterable[BoundSide], device: str, progress: Callable[[str], object], *, compare: bool
) -> DiagnoseResult:
    """Record each side. With `compare`, also time the side's collectives alone."""
    offset, host_error = current_group().clock_offset()
    recorded, errors = {}, []
    for side in sides:
        progress(f"record {side.name}")
        with closing(side):
            queued = not compare and device.startswith("cuda")
            calls = _record(partial(side.run, 0), device, offset, queued=queued)
        _refuse_smaller_groups(side.name)
        ranks, error = aligned(current_group().gather(calls))
        try:
            met = meetings(ranks)
        except ValueError as wrong:
            raise PageError(f"{side.name}: {wrong}") from None
        alone: dict[str, float | None] = {}
        for meeting in met[0] if compare else ():
            if meeting.key not in alone:
                progress(f"time {meeting.key} alone")
                alone[meeting.key] = _alone(meeting, device, offset)
        recorded[side.name] = SideArrivals(met, [alone.get(m.key) for m in met[0]])
        errors.append(host_error if error is None or met[0][0].name == END else error)
    return DiagnoseResult(recorded, max(errors))


def aligned(
    ranks: Sequence[Sequence[Sequence[Operation]]],
) -> tuple[Sequence[Sequence[Sequence[Operation]]], float | None]:
    """Return the operations with the kernels of all ranks on the clock of rank 0's GPU.

    The all-reduce at the start of a call cannot end on any rank before all ranks have begun it. The
    rank that begins last has the shortest duration. The ends on two ranks differ by at most this
    duration.

    Args:
        ranks: the operations by rank and call.

    Returns:
        The operations, and the error of the alignment in seconds. The error is None for Gloo, whose
        operations stay on the host's clock.
    """
    starts = [[operations[0] for operations in rank] for rank in ranks]
    if any(start.name != START for rank in starts for start in rank):
        return ranks, None
    error, moved = min(o.end - o.start for rank in starts for o in rank), []
    for rank, own in zip(ranks, starts, strict=True):
        apart = [start.end - first.end for start, first in zip(own, starts[0], strict=True)]
        ahead = median(apart)
        error = max(error, median(abs(each - ahead) for each in apart))
        moved.append([[_earlier(o, ahead) for o in operations] for operations in rank])
    return moved, error


def _earlier(operation: Operation, seconds: float) -> Operation:
    if operation.name == END:  # on the host's clock
        return operation
    start, end = operation.start - seconds, operation.end - seconds
    return replace(operation, start=start, end=end)


def meetings(ranks: Sequence[Sequence[Sequence[Operation]]]) -> list[Call]:
    """Return the meetings in each call, given the operations by rank and call.

    If a call has only transfers between two ranks, the end of the call counts as a meeting.

    Raises:
        ValueError: there is no operation, or the ranks do not make the same collectives.
    """
    calls = [_meetings_of(operations) for operations in zip(*ranks, strict=True)]
    if len({tuple(m.key for m in call) for call in calls}) != 1:
        raise ValueError("its calls do not make the same collectives each time")
    if not calls[0]:
        raise ValueError("it calls no collective of torch.distributed")
    return calls


def _meetings_of(ranks: Sequence[Sequence[Operation]]) -> Call:
    """Return the meetings of one call, given its operations by rank."""
    pairwise = {*SENT, *RECEIVED}
    names = {operation.name for operations in ranks for operation in operations}
    collectives = names - pairwise - {START, END}
    if not collectives and names & pairwise:
        collectives = {END}
    chosen = [[o for o in operations if o.name in collectives] for operations in ranks]
    orders = [[f"{o.name} {o.nbytes}" for o in operations] for operations in chosen]
    if any(order != orders[0] for order in orders):
        counts = ", ".join(f"rank {rank} {len(order)}" for rank, order in enumerate(orders))
        raise ValueError(f"its ranks do not make the same collectives: {counts}")
    found, before = [], [-math.inf] * len(ranks)
    for same in zip(*chosen, strict=True):
        arrived = [o.start for o in same]
        blocked = [
            _blocked(ranks, rank, since, until)
            for rank, (since, until) in enumerate(zip(before, arrived, strict=True))
        ]
        ended = [o.end for o in same]
        found.append(Meeting(same[0].name, same[0].nbytes, arrived, ended, blocked))
        before = arrived
    return found


def _blocked(ranks: Sequence[Sequence[Operation]], rank: int, since: float, until: float) -> float:
    """Return the seconds that `rank` waited to receive while no other rank had begun to send.

    An early receive waits for the sender only until the sender begins. The rest of the receive does
    not count, because the rank may have computed in that time.
    """
    others = [o for number, each in enumerate(ranks) if number != rank for o in each]
    seconds, last = 0.0, since
    for receive in sorted(ranks[rank], key=lambda o: o.start):
        if receive.name not in RECEIVED:
            continue
        sends = [o.start for o in others if o.name in SENT and o.start <= receive.end]
        begin, end = max(receive.start, last), min(max(sends, default=-math.inf), until)
        seconds, last = seconds + max(0.0, end - begin), max(last, end)
    return seconds


def _record(
    run: Callable[[], object], device: str, offset: float, *, queued: bool = False
) -> list[list[Operation]]:
    """Return this rank's operations in each of `CALLS` calls. All ranks begin a call together.

    Args:
        queued: whether the host queues a call while the GPU is busy. Then the arrivals do not
            depend on the hosts. Hosts of two healthy ranks can be 0.1 ms apart.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device.startswith("cuda") else []
    synchronize = synchronizer(device)

    def call() -> None:
        if queued:
            torch.cuda._sleep(QUEUE_CYCLES)
        current_group().start_window(device)
        if not queued:
            synchronize()
        with record_function(RANGE):
            run()
            synchronize()

    for _ in range(WARMUP):
        call()
    with profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(CALLS):
            call()
    assert profiler.profiler is not None
    return operations(profiler.profiler.kineto_results.events(), offset)


def _alone(meeting: Meeting, device: str, offset: float) -> float | None:
    """Return the median transfer time of a collective, in seconds, when nothing else runs."""
    if meeting.name not in OPS or not meeting.nbytes:
        return None
    run = known_collective(meeting.name, meeting.nbytes, device).run
    ranks, _ = aligned(current_group().gather(_record(run, device, offset)))
    calls = meetings(ranks)
    return sorted(call[0].transfer for call in calls)[len(calls) // 2]


def _refuse_smaller_groups(name: str) -> None:
    """Raise `PageError` if any rank is in a process group that lacks some of the ranks."""
    from torch.distributed import distributed_c10d

    group = current_group()
    sizes = [len(ranks) for ranks in distributed_c10d._world.pg_group_ranks.values()]
    if group.max(any(size < group.world for size in sizes)):
        raise PageError(
            f"{name} uses a process group of only some ranks, which is not supported:"
            " a recording does not tell which group a collective belongs to"
        )
