"""Sum over all ranks: copy engines move the data, and the SMs only add."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

STREAMS = 2


class CopiedSums:
    """Sum `count` tensors of one shape over all ranks, in place.

    Every rank sums a share of each tensor. The rank pulls this share from all other ranks, adds,
    and pushes the sum back to them. The first barrier waits until all ranks have written their
    tensors. The last barrier waits until all ranks have received every share. Successive tensors
    use different streams. These streams have high priority, so a barrier or an addition can start
    as soon as one block of a running product ends.

    Attributes:
        mine: this rank's tensors, in symmetric memory. The caller writes them before `start`. After
            `wait`, they contain the sums.
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
        """Start the sum of tensor `k`, after copying `value` into it if given. Keep `value` until
        `wait`."""
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
        """Make the current stream wait for all sums that were started."""
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)


def _share(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Return the share of `tensor` that `rank` sums, as a flat tensor."""
    return tensor.view(-1).tensor_split(world)[rank]
