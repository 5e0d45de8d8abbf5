"""The GPU memory that a call of a side needs beyond its inputs."""

from __future__ import annotations

import time
from contextlib import closing

from ..checking.inputs import BoundSide, InputPool, alone, one_slot
from ..page.pair import Side
from ..util.device_state import release
from ..util.process_group import current_group

WATCHDOG = 0.25
"""Seconds after which NCCL's watchdog, which polls every 0.1 s, has seen every finished send."""


def drop_sent_tensors() -> None:
    """Wait for the GPU, and make ranks drop the tensors that they sent.

    NCCL's process group holds a tensor until its watchdog has seen the send finish and the next
    collective begins. Without this, the next side would be charged for the last side's tensors.
    """
    import torch

    torch.cuda.synchronize()
    if current_group().world > 1:
        time.sleep(WATCHDOG)
        current_group().start_window("cuda")
        torch.cuda.synchronize()


def peak_bytes(side: BoundSide) -> int:
    """Return the most bytes that one call holds on a GPU beyond its inputs.

    Outputs and memory held by preparation count. Three kinds of memory do not count: memory kept
    since an earlier call, memory of the side's own graph, and memory that torch did not allocate.
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
    """Return the most bytes that calls of `side` hold on a GPU beyond inputs and state.

    Counted are outputs, temporaries, memory held by preparation, and what the first call leaves for
    the second, such as an optimizer's moments. With several ranks, the rank that needs most counts.
    """
    return current_group().max(_peaks(pool, side)[0])


def reserved(pool: InputPool, side: Side) -> float:
    """Return the most bytes that the allocator reserves on a GPU for calls of `side`.

    The initial state counts, the inputs do not.
    """
    return current_group().max(_peaks(pool, side)[1])


def fragmentation(pool: InputPool, side: Side) -> float:
    """Return how many bytes are reserved on a GPU for `side` beyond the most that it holds."""
    held, taken = _peaks(pool, side)
    return current_group().max(max(0.0, taken - held))


def _peaks(pool: InputPool, side: Side) -> tuple[float, float]:
    """Return the most bytes allocated and reserved for `side` while it is called.

    The side has already run, so that no library workspace counts. Allocations are measured at the
    second call. Reserved memory is never returned, so it is measured from the first call.
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
    """Return the most bytes that a second call holds beyond inputs and state."""
    import torch

    before = torch.cuda.memory_allocated() - side.held_bytes
    side.run(0)
    side.outputs[0] = None
    drop_sent_tensors()
    torch.cuda.reset_peak_memory_stats()
    side.run(0)
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)
