"""Measure the GPU memory that a call of a side needs beyond its inputs."""

from __future__ import annotations

import time
from contextlib import closing

from ..checking.inputs import BoundSide, InputPool, alone, one_slot
from ..page.pair import Side
from ..util.device_state import release
from ..util.process_group import current_group

WATCHDOG = 0.25
"""Seconds to wait for NCCL's watchdog. It polls every 0.1 s, so it has then seen every send."""


def drop_sent_tensors() -> None:
    """Wait for the GPU, and make each rank free the tensors that it has sent.

    NCCL's process group keeps a tensor until two things have happened: its watchdog has seen that
    the send is finished, and the next collective has begun. Without this function, tensors of one
    side would be included in the memory of the next side.
    """
    import torch

    torch.cuda.synchronize()
    if current_group().world > 1:
        time.sleep(WATCHDOG)
        current_group().start_window("cuda")
        torch.cuda.synchronize()


def peak_bytes(side: BoundSide) -> int:
    """Return the peak GPU memory of one call beyond its inputs, in bytes.

    This includes the outputs and the memory that the side's preparation keeps. It does not include
    memory kept since an earlier call, memory of the side's own graph, or memory that torch did not
    allocate.
    """
    import torch

    drop_sent_tensors()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    side.run(0)
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.synchronize()
    side.restore()
    return int(current_group().max(float(side.held_bytes + peak - before)))


def allocated(pool: InputPool, side: Side) -> float:
    """Return the peak GPU memory of calls of `side` beyond inputs and state, in bytes.

    This includes outputs, temporaries, the memory that preparation keeps, and memory that the first
    call leaves for the second, such as an optimizer's moments. With several ranks, this is the peak
    of the rank that needs the most memory.
    """
    return current_group().max(_peaks(pool, side)[0])


def reserved(pool: InputPool, side: Side) -> float:
    """Return the peak of the bytes that the allocator reserves on a GPU for calls of `side`.

    The initial state is included, but the inputs are not.
    """
    return current_group().max(_peaks(pool, side)[1])


def fragmentation(pool: InputPool, side: Side) -> float:
    """Return the peak of reserved GPU memory for `side`, minus its peak of allocated memory."""
    held, taken = _peaks(pool, side)
    return current_group().max(max(0.0, taken - held))


def _peaks(pool: InputPool, side: Side) -> tuple[float, float]:
    """Return the peaks of allocated and of reserved memory during calls of `side`, in bytes.

    The side has run before, so the workspaces of libraries already exist and are not included.
    Allocated memory is measured at the second call. Reserved memory is measured from the first
    call on, because the allocator does not return it.
    """
    import torch

    with alone(pool, side) as bound:
        _allocated_by_second_call(bound)

    drop_sent_tensors()
    release(pool.device)
    with one_slot(pool):
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        with closing(pool.bind(side)) as bound:
            held = _allocated_by_second_call(bound)
            torch.cuda.synchronize()
            return held, float(torch.cuda.memory_reserved() - before)


def _allocated_by_second_call(side: BoundSide) -> float:
    """Return the peak of allocated memory in a second call beyond inputs and state, in bytes."""
    import torch

    before = torch.cuda.memory_allocated() - side.held_bytes
    side.run(0)
    side.outputs[0] = None
    drop_sent_tensors()
    torch.cuda.reset_peak_memory_stats()
    side.run(0)
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)
