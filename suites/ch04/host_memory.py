"""Host memory that all ranks of a machine share, pinned if there are GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def shared_by_all(like: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Yield one host tensor per rank, of the shape and type of `like`, shared by all ranks.

    All ranks must enter and leave this context, in the same order. Rank r allocates tensor r, and
    each rank pins all tensors for its own GPU.
    """
    size = like.numel() * like.element_size()
    file = os.memfd_create("aisp")
    os.ftruncate(file, size)
    paths = [""] * dist.get_world_size()
    dist.all_gather_object(paths, f"/proc/{os.getpid()}/fd/{file}")
    maps = [torch.from_file(path, shared=True, size=size, dtype=torch.uint8) for path in paths]
    dist.barrier()  # now all ranks have mapped all files
    os.close(file)
    for memory in maps if like.is_cuda else ():
        _check(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
    try:
        yield [memory.view(like.dtype).view(like.shape) for memory in maps]
    finally:
        for memory in maps if like.is_cuda else ():
            torch.cuda.synchronize()
            _check(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))


def _check(error: object) -> None:
    torch.cuda.check_error(int(error))
