"""The ranks that run a pair together: one process, or several that `torch.distributed` joined.

All ranks must reach the same decision: a rank that makes one more call waits in a collective
forever. A decision may depend on values that differ between ranks, such as times, free memory, or a
failed capture. Every such value goes through `current_group()`, which returns the same value on all
ranks. Random choices come from seeds that the ranks share.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class SingleProcess:
    """One process by itself, for which each method returns its argument."""

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

    def first_message(self, text: str | None) -> str | None:
        """Return the text of the first rank that has one, with the rank's number, or None."""
        return text

    def broadcast(self, value: T) -> T:
        """Return the `value` of rank 0."""
        return value

    def start_window(self, device: str) -> None:
        """Wait until all ranks can start a window, as the last step before its start time."""

    def slowest(self, seconds: float) -> float:
        """Return the seconds of the window's slowest rank."""
        return seconds

    def details(self) -> dict[str, object]:
        """Return facts of JSON types for the row."""
        return {}


class Ranks(SingleProcess):
    """`world` processes that `torch.distributed` joined; this one is `rank`.

    The ranks agree through a separate Gloo group, which is independent of the page's backend.

    Args:
        tell: called with the number of each agreement before this rank waits for it. The rank with
            the lowest number is the one that hangs.
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

    def start_window(self, device: str) -> None:
        import torch
        import torch.distributed as dist

        if not device.startswith("cuda"):
            dist.barrier(group=self._group)
        else:
            # On the stream: earlier work may still run, and no GPU starts alone.
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
        """Return the median and the largest seconds between the first and the last rank's start.

        These are host times of the launch. They are meaningless between machines, because the
        clocks differ.
        """
        if not self._skews:
            return {}
        skews, self._skews = sorted(self._skews), []
        return {"ranks": self.world, "launch_skew": [skews[len(skews) // 2], skews[-1]]}


_current = SingleProcess()


def current_group() -> SingleProcess:
    """Return the ranks that this process belongs to."""
    return _current


def set_current_group(ranks: SingleProcess) -> None:
    """Make `ranks` the ranks that this process belongs to."""
    global _current
    _current = ranks
