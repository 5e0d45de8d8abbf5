"""Sums over the ranks whose parts are moved by copy engines; processors only add."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

STREAMS = 2


class CopiedSums:
    """`count` tensors of one shape, each to be summed over all ranks where it lies.

    Every rank sums a share of each tensor: it pulls that share from all others, adds, and pushes
    the sum back to them. In between nobody else reads or writes it, so there are two barriers a
    tensor: all have written theirs, all have been given every share. The streams, which take turns,
    have priority: a barrier or an addition waits for one block of a product, not for all of them.

    Attributes:
        mine: the tensors, in symmetric memory: written by their owner before `start`, sums after
            `wait`.
    """

    def __init__(self, count: int, shape: tuple[int, ...], like: torch.Tensor) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        whole = count, *shape
        self.mine = symmetric.empty(whole, dtype=like.dtype, device=like.device)
        self._handle = symmetric.rendezvous(self.mine, dist.group.WORLD)
        others = [(rank + step) % world for step in range(1, world)]
        theirs = [self._handle.get_buffer(other, whole, like.dtype) for other in others]
        self._shares = [_share(part, rank, world) for part in self.mine]
        self._theirs = [[_share(t[k], rank, world) for t in theirs] for k in range(count)]
        self._streams = [torch.cuda.Stream(priority=-1) for _ in range(STREAMS)]
        self._pulled = [torch.empty_like(self._shares[0]) for _ in range(STREAMS)]

    def start(self, k: int, value: torch.Tensor | None = None) -> None:
        """Begin to sum tensor `k`, or `value` in its place, which must live until `wait`."""
        turn = k % STREAMS
        stream, share, pulled = self._streams[turn], self._shares[k], self._pulled[turn]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if value is not None:
                self.mine[k].copy_(value)
            self._handle.barrier(channel=turn)
            for theirs in self._theirs[k]:
                pulled.copy_(theirs)
                share.add_(pulled)
            for theirs in self._theirs[k]:
                theirs.copy_(share)
            self._handle.barrier(channel=turn)

    def wait(self) -> None:
        """Have the current stream wait for all sums that were begun."""
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)


def _share(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Return what `rank` sums of `tensor`, flat."""
    return tensor.view(-1).tensor_split(world)[rank]
