"""Costs of messages between ranks, without DRAM traffic, because DRAM is far faster."""

from __future__ import annotations

from pytest_aisp import Cost


def all_reduced(nbytes: float, world: int) -> float:
    """Return the bytes that each rank sends in an all-reduce of `nbytes` without multicast."""
    return 2 * (world - 1) / world * nbytes


def all_reduce_of(nbytes: float, world: int) -> Cost:
    """Return the cost of an all-reduce of `nbytes`."""
    return Cost(nccl=all_reduced(nbytes, world), launches=1, collectives=1)


def exchange(nbytes: float, world: int) -> Cost:
    """Return the cost of an all-gather, all-to-all or reduce-scatter of `nbytes`.

    `nbytes` is the size of all parts together: the output of an all-gather, or the input of an
    all-to-all or reduce-scatter.
    """
    return Cost(nccl=(world - 1) / world * nbytes, launches=1, collectives=1)


def collective(sent: float) -> Cost:
    """Return the cost of sending (or copying) `sent` bytes per rank to another rank."""
    return Cost(sent=sent, launches=1, collectives=1)


def through_memory(sent: float, signals: int) -> Cost:
    """Return the cost of a kernel that uses other ranks' memory.

    Args:
        sent: the number of bytes that each rank sends, or that other ranks read from it.
        signals: how often the kernel waits for other ranks: for a signal, for data, or for a read
            from their memory. Each wait counts as one barrier.
    """
    return Cost(sent=sent, launches=1, barriers=signals)


def copied_sum(nbytes: float, world: int) -> Cost:
    """Return the cost of a sum by `CopiedSums`: a pull, an add and a push, between two barriers."""
    one_way = Cost(sent=all_reduced(nbytes, world) / 2, launches=2, barriers=1)
    share = nbytes / world
    add = Cost(read=2 * share, write=share, launches=1)
    return one_way + (world - 1) * add + one_way
