"""The ranks that run a pair together: one when a page needs one device, `gpus` otherwise.

Every rank runs the same engine on the same task. What they must not do is decide apart: a rank
that makes one more call waits in a collective for ever. So whatever a decision rests on that a rank
finds out by itself (times, free memory, a capture that fails) goes through `here()`, after which
all ranks hold the same, and random choices are drawn from seeds that they share. Alone, `here()`
returns what it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Any


class SingleProcess:
    """One process by itself."""

    rank, world = 0, 1

    def most(self, value: float) -> float:
        """Return the largest `value` of all ranks."""
        return value

    def least(self, value: int) -> int:
        """Return the least `value` of all ranks."""
        return value

    def total(self, value: float) -> float:
        """Return the sum of all ranks' `value`."""
        return value

    def first(self, text: str | None) -> str | None:
        """Return the text of the first rank that has one, with its name, or None."""
        return text

    def shared(self, value: Any) -> Any:
        """Return the `value` of rank 0."""
        return value

    def begin(self, device: str) -> None:
        """Let all ranks begin a window together: the last thing before its start is stamped."""

    def slowest(self, seconds: float) -> float:
        """Return the seconds of the window's slowest rank."""
        return seconds

    def details(self) -> dict[str, Any]:
        """Return facts of JSON types for the row."""
        return {}


class Ranks(SingleProcess):
    """`world` processes that `torch.distributed` has joined; this one is `rank`.

    What they agree on goes through a group of Gloo's, whatever the page's own collectives use.

    Args:
        tell: is told the number of each agreement before this rank waits for it: the rank that is
            not heard of again is the one that hangs.
    """

    def __init__(self, rank: int, world: int, tell: Callable[[int], Any]) -> None:
        import torch.distributed as dist

        self.rank, self.world, self._tell = rank, world, tell
        self._group = dist.new_group(backend="gloo")
        self._agreements = 0
        self._begun = 0
        self._skews: list[float] = []
        self._flag: Any = None

    def _agree(self) -> None:
        self._agreements += 1
        self._tell(self._agreements)

    def _gather(self, *values: float) -> list[list[float]]:
        """Return the values of every rank."""
        import torch
        import torch.distributed as dist

        self._agree()
        mine = torch.tensor(values, dtype=torch.float64)
        all_ = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(all_, mine, group=self._group)
        return [one.tolist() for one in all_]

    def most(self, value: float) -> float:
        return max(one for (one,) in self._gather(value))

    def total(self, value: float) -> float:
        return sum(one for (one,) in self._gather(value))

    def least(self, value: int) -> int:
        return int(min(one for (one,) in self._gather(value)))

    def first(self, text: str | None) -> str | None:
        has = [bool(one) for (one,) in self._gather(text is not None)]
        if not any(has):
            return None
        source = has.index(True)
        return f"rank {source}: {self._broadcast(text, source)}"

    def shared(self, value: Any) -> Any:
        self._agree()
        return self._broadcast(value, 0)

    def _broadcast(self, value: Any, source: int) -> Any:
        import torch.distributed as dist

        said = [value]
        dist.broadcast_object_list(said, src=source, group=self._group)
        return said[0]

    def begin(self, device: str) -> None:
        import torch
        import torch.distributed as dist

        if not device.startswith("cuda"):
            dist.barrier(group=self._group)
        else:
            # On the stream, so that what was launched before runs on, and no GPU starts alone.
            if self._flag is None:
                self._flag = torch.zeros(1, device="cuda")
            dist.all_reduce(self._flag)
        self._begun = monotonic_ns()

    def slowest(self, seconds: float) -> float:
        found = self._gather(seconds, float(self._begun % 10**15))
        begun = [at for _, at in found]
        self._skews.append((max(begun) - min(begun)) * 1e-9)
        return max(one for one, _ in found)

    def details(self) -> dict[str, Any]:
        """Return the median and the largest seconds between the first and the last rank's start.

        That is on the host, where a window is launched; on ranks of several machines, whose clocks
        differ, it says nothing.
        """
        if not self._skews:
            return {}
        skews, self._skews = sorted(self._skews), []
        return {"ranks": self.world, "launch_skew": [skews[len(skews) // 2], skews[-1]]}


_here = SingleProcess()


def current_group() -> SingleProcess:
    """Return the ranks that this process belongs to."""
    return _here


def join(ranks: SingleProcess) -> None:
    """Make `ranks` those that this process belongs to."""
    global _here
    _here = ranks
