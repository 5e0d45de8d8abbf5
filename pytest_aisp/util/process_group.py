"""The ranks that run a pair together: one process, or several connected by `torch.distributed`.

All ranks must make the same decisions: a rank that makes one call more than the others waits in a
collective forever. Some decisions depend on values that differ between ranks, such as times, free
memory, or a failed capture. These values go through `current_group()`, which returns the same value
on all ranks. Random choices come from seeds that the ranks share.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic_ns, time_ns
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
ROUND_TRIPS = 32
"""The number of round trips to each rank. The fastest one gives the best clock offset."""


class SingleProcess:
    """A single process. Each method that combines values returns its argument."""

    rank, world = 0, 1

    def max(self, value: float) -> float:
        """Return the largest `value` of all ranks."""
        return value

    def min(self, value: int) -> int:
        """Return the smallest `value` of all ranks."""
        return value

    def sum(self, value: float) -> float:
        """Return the sum of all ranks' `value`."""
        return value

    def sum_here(self, value: float) -> float:
        """Return the sum of the `value` of all ranks on this machine."""
        return value

    def first_message(self, text: str | None) -> str | None:
        """Return the first text that is not None, with its rank's number, or None."""
        return text

    def broadcast(self, value: T) -> T:
        """Return the `value` that rank 0 has."""
        return value

    def gather(self, value: T) -> list[T]:
        """Return the `value` of every rank."""
        return [value]

    def clock_offset(self) -> tuple[float, float]:
        """Return the seconds by which this rank's clock is ahead of rank 0's, and the error.

        The clock is `time.time_ns`.
        """
        return 0.0, 0.0

    def start_window(self, device: str) -> None:
        """Wait until all ranks can start a window. Call this just before the clock is read."""

    def slowest(self, seconds: float) -> float:
        """Return the time in seconds that the slowest rank took for the window."""
        return seconds

    def details(self) -> dict[str, object]:
        """Return facts about the ranks for the row, in JSON types."""
        return {}


class Ranks(SingleProcess):
    """`world` processes, connected by `torch.distributed`. This process is `rank`.

    The ranks exchange values in a separate Gloo group, which is independent of the page's backend.

    Args:
        tell: a function that is called with the number of each exchange before this rank waits for
            the exchange. If the ranks hang, the cause is the rank whose last exchange has the
            lowest number.
    """

    def __init__(self, rank: int, world: int, tell: Callable[[int], object]) -> None:
        import torch.distributed as dist

        self.rank, self.world, self._tell = rank, world, tell
        self._group = dist.new_group(backend="gloo")
        self._agreements = 0
        self._started_ns = 0
        self._skews: list[float] = []
        self._flag: torch.Tensor | None = None

    def _count_agreement(self) -> None:
        self._agreements += 1
        self._tell(self._agreements)

    def _gather(self, *values: float) -> list[list[float]]:
        """Return the values of every rank."""
        import torch
        import torch.distributed as dist

        self._count_agreement()
        mine = torch.tensor(values, dtype=torch.float64)
        gathered = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(gathered, mine, group=self._group)
        return [each.tolist() for each in gathered]

    def max(self, value: float) -> float:
        return max(each for (each,) in self._gather(value))

    def sum(self, value: float) -> float:
        return sum(each for (each,) in self._gather(value))

    @property
    def _share(self) -> int:
        """The number of ranks on each machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world))

    def sum_here(self, value: float) -> float:
        first = self.rank - self.rank % self._share
        return sum(each for (each,) in self._gather(value)[first : first + self._share])

    def min(self, value: int) -> int:
        return int(min(each for (each,) in self._gather(value)))

    def first_message(self, text: str | None) -> str | None:
        has_text = [bool(each) for (each,) in self._gather(text is not None)]
        if not any(has_text):
            return None
        source = has_text.index(True)
        return f"rank {source}: {self._broadcast_from(source, text)}"

    def broadcast(self, value: T) -> T:
        self._count_agreement()
        return self._broadcast_from(0, value)

    def _broadcast_from(self, source: int, value: T) -> T:
        import torch.distributed as dist

        values = [value]
        dist.broadcast_object_list(values, src=source, group=self._group)
        return values[0]

    def gather(self, value: T) -> list[T]:
        import torch.distributed as dist

        self._count_agreement()
        values = [value] * self.world
        dist.all_gather_object(values, value, group=self._group)
        return values

    def clock_offset(self) -> tuple[float, float]:
        offsets, error = [0.0], 0.0
        for other in range(1, self.world):
            offset, half = self.broadcast(self._round_trips(other))
            # Clocks that may be equal are treated as equal, because ranks on one machine share a
            # clock.
            offsets.append(offset if abs(offset) > half else 0.0)
            error = max(error, half)
        return offsets[self.rank], error

    def _round_trips(self, other: int) -> tuple[float, float]:
        """On rank 0, return the clock offset of rank `other`, and half of the fastest round trip.

        The error is at most half of the round trip, because the other clock was read during the
        trip.
        """
        import torch
        import torch.distributed as dist

        trips, cell = [], torch.zeros(1, dtype=torch.int64)
        for _ in range(ROUND_TRIPS if self.rank in (0, other) else 0):
            if self.rank:
                dist.recv(cell, 0, group=self._group)
                dist.send(cell.fill_(time_ns()), 0, group=self._group)
                continue
            sent = time_ns()
            dist.send(cell, other, group=self._group)
            dist.recv(cell, other, group=self._group)
            half = (time_ns() - sent) / 2
            trips.append((half * 1e-9, (int(cell) - sent - half) * 1e-9))
        half, offset = min(trips, default=(0.0, 0.0))
        return offset, half

    def start_window(self, device: str) -> None:
        import torch
        import torch.distributed as dist

        if not device.startswith("cuda"):
            dist.barrier(group=self._group)
        else:
            # The collective on the stream waits for earlier work, and all GPUs continue together.
            if self._flag is None:
                self._flag = torch.zeros(1, device="cuda")
            dist.all_reduce(self._flag)
        self._started_ns = monotonic_ns()

    def slowest(self, seconds: float) -> float:
        gathered = self._gather(seconds, float(self._started_ns % 10**15))
        starts = [start for _, start in gathered]
        self._skews.append((max(starts) - min(starts)) * 1e-9)
        return max(each for each, _ in gathered)

    def details(self) -> dict[str, object]:
        """Return the time between the first and the last rank's start, as median and maximum
        seconds.

        The host's clock measures these start times. If the ranks run on several machines, the
        result has no such times, because the machines' clocks differ.
        """
        if not self._skews:
            return {}
        skews, self._skews = sorted(self._skews), []
        if self._share < self.world:
            return {"ranks": self.world}
        return {"ranks": self.world, "launch_skew": [skews[len(skews) // 2], skews[-1]]}


_current = SingleProcess()


def current_group() -> SingleProcess:
    """Return the ranks that this process belongs to."""
    return _current


def set_current_group(ranks: SingleProcess) -> None:
    """Make `ranks` the ranks that this process belongs to."""
    global _current
    _current = ranks
