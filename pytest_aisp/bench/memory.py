"""The memory that a call of a side needs beyond its inputs."""

from __future__ import annotations

from ..proof.sides import Subject


def peak_bytes(subject: Subject) -> int:
    """Return the most bytes that one call of `subject` holds on the GPU beyond its inputs.

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
    return subject.held + int(most - before)
