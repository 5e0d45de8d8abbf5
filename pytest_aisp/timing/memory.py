"""The memory that a call of a side needs beyond its inputs."""

from __future__ import annotations

import time
from contextlib import closing

from ..checking.inputs import BoundSide, InputPool, alone, one_slot
from ..page.pair import Side
from ..util.device_state import release
from ..util.process_group import current_group

WATCHDOG = 0.25
"""Seconds in which NCCL's watchdog has looked at all that was sent: it looks every 0.1 s."""


def let_go() -> None:
    """Wait for the GPU, and have ranks let go of what they sent.

    NCCL's process group holds a tensor until its watchdog has seen that it was sent and the next
    collective begins. What a side has sent last would else be on the next one's account.
    """
    import torch

    torch.cuda.synchronize()
    if current_group().world > 1:
        time.sleep(WATCHDOG)
        current_group().start_window("cuda")
        torch.cuda.synchronize()


def peak_bytes(subject: BoundSide) -> int:
    """Return the most bytes that one call of `subject` holds on a GPU beyond its inputs.

    Outputs and what preparing keeps are counted. What a side has kept since an earlier call, what
    a graph of its own keeps for itself, and memory that is not torch's are not.
    """
    import torch

    let_go()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    subject.run(0)
    most = torch.cuda.max_memory_allocated()
    torch.cuda.synchronize()
    subject.restore()
    return int(current_group().max(float(subject.held + most - before)))


def allocated(bench: InputPool, side: Side) -> float:
    """Return the most bytes that calls of `side` hold on a GPU beyond inputs and state.

    Counted are outputs, temporaries, what preparing keeps, and what the first call has left for
    the second: an optimizer's moments. On several ranks, those of the rank that needs most.
    """
    return current_group().max(_most(bench, side)[0])


def reserved(bench: InputPool, side: Side) -> float:
    """Return the most bytes that the allocator has taken from a GPU for calls of `side`.

    The state that it begins with is among them, the inputs are not.
    """
    return current_group().max(_most(bench, side)[1])


def fragmentation(bench: InputPool, side: Side) -> float:
    """Return how many more bytes were taken from a GPU for `side` than it ever held."""
    held, taken = _most(bench, side)
    return current_group().max(max(0.0, taken - held))


def _most(bench: InputPool, side: Side) -> tuple[float, float]:
    """Return the most bytes allocated and reserved for `side` while it is called.

    It has run before, so that a library's workspace is on nobody's account. What it holds is then
    watched at the second call; what was taken for it is never given back, so that is watched from
    the first.
    """
    import torch

    with alone(bench, side) as subject:
        _held(subject)

    let_go()
    release(bench.device)
    with one_slot(bench):
        torch.cuda.synchronize()
        began = torch.cuda.memory_reserved()
        with closing(bench.subject(side)) as subject:
            held = _held(subject)
            torch.cuda.synchronize()
            return held, float(torch.cuda.memory_reserved() - began)


def _held(subject: BoundSide) -> float:
    """Return the most bytes that a second call of `subject` holds beyond inputs and state."""
    import torch

    before = torch.cuda.memory_allocated() - subject.held
    subject.run(0)
    subject.outputs[0] = None
    let_go()
    torch.cuda.reset_peak_memory_stats()
    subject.run(0)
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)
