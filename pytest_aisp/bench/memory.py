"""The memory that a call of a side needs beyond its inputs."""

from __future__ import annotations

from collections.abc import Sequence

from ..common.peers import here
from ..common.quiet import release
from ..pages.pair import Side
from ..proof.sides import Subject
from ..proof.workbench import Workbench, alone
from .nodes import ROLES


def peak_bytes(subject: Subject) -> int:
    """Return the most bytes that one call of `subject` holds on a GPU beyond its inputs.

    Outputs and what preparing keeps are counted. What a side has kept since an earlier call, what
    a graph of its own keeps for itself, and memory that is not torch's are not.
    """
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    subject.run(0)
    most = torch.cuda.max_memory_allocated()
    torch.cuda.synchronize()
    subject.restore()
    return int(here().most(float(subject.held + most - before)))


def peaks(bench: Workbench, sides: Sequence[Side]) -> dict[str, int]:
    """Return by role the most bytes that calls of a side hold on a GPU beyond inputs and state.

    Counted are outputs, temporaries, what preparing keeps, and what the first call has left for
    the second: an optimizer's moments. Each side has run before, so that a library's workspace is
    on nobody's account. On several ranks, each side's is that of the rank that needs most.
    """
    for side in sides:
        _grown(bench, side)
    found = [int(here().most(float(_grown(bench, side)))) for side in sides]
    return dict(zip(ROLES, found, strict=True))


def _grown(bench: Workbench, side: Side) -> int:
    import torch

    release(bench.device)
    with alone(bench, side) as subject:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated() - subject.held
        subject.run(0)
        subject.outputs[0] = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        subject.run(0)
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)
