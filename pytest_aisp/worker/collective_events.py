"""Find the collectives of each call in the events of torch's profiler."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..page.pair import PageError
from ..timing.collectives import OPS
from ..util.process_group import current_group

RANGE = "aisp-call"
START, END = "start of the call", "end of the call"
SENT, RECEIVED = ("send", "exchange"), ("recv", "exchange")
"""Operations that send and that receive. A kernel of NCCL may do both: an ``exchange``."""
WIDTHS = {"double": 8, "long int": 8, "c10::Half": 2, "c10::BFloat16": 2, "unsigned char": 1}
"""Bytes of an element, by the profiler's name of the type. Other types are counted as 4 bytes."""


class Operation(Struct, frozen=True):
    """A collective, or a transfer between two ranks, on one rank.

    Attributes:
        name: a name such as ``all_reduce``, ``send`` or ``recv``.
        nbytes: the bytes of a collective's buffer, as defined by `OPS`, or 0 if unknown.
        start, end: seconds on rank 0's clock.
    """

    name: str
    nbytes: int
    start: float
    end: float


def operations(events: Iterable[Any], offset: float) -> list[list[Operation]]:
    """Return the operations of each call, given the profiler's events and the clock's offset.

    With NCCL, the first operation of a call is the all-reduce before the call.
    """
    calls, posted, kernels = [], [], []
    for event in sorted(events, key=lambda e: int(e.start_ns())):
        backend, _, name = event.name().partition(":")
        start, end = event.start_ns() * 1e-9 - offset, event.end_ns() * 1e-9 - offset
        if event.name() == RANGE and event.device_type().name == "CPU":
            calls.append(Operation(END, 0, start, end))
        elif backend in ("gloo", "nccl") and event.device_type().name == "CPU":
            posted.append(_operation(name.split()[0], event, start, end))
        elif event.name().startswith("ncclDevKernel"):
            kernels.append(Operation("", 0, start, end))
    times = posted
    if kernels:
        posted, times = _on_gpu(posted, kernels)
    found = []
    for call in calls:
        inside = [
            o for o, p in zip(times, posted, strict=True) if call.start <= p.start <= call.end
        ]
        before = [o for o, p in zip(times, posted, strict=True) if p.start < call.start]
        starts = [replace(o, name=START) for o in before[-1:] if kernels]
        found.append([*starts, *inside, replace(call, start=call.end)])
    return found


def _on_gpu(
    posted: Sequence[Operation], kernels: Sequence[Operation]
) -> tuple[list[Operation], list[Operation]]:
    """Return `posted` and the same operations with the times of their kernels.

    The kernels run in the order in which they were posted.
    """
    posted = [o for o in posted if o.name != "barrier" or len(posted) == len(kernels)]
    if len(posted) != len(kernels):
        raise PageError(
            f"{len(posted)} operations of NCCL launched {len(kernels)} kernels:"
            " which belongs to which is unknown"
        )
    pairs = zip(posted, kernels, strict=True)
    return posted, [replace(o, start=kernel.start, end=kernel.end) for o, kernel in pairs]


def _operation(name: str, event: Any, start: float, end: float) -> Operation:
    name = {"coalesced": "exchange", "_all_gather_base": "all_gather"}.get(name, name)
    name = "reduce_scatter" if name == "_reduce_scatter_base" else name
    elements = sum(math.prod(shape) for shape in event.shapes())
    width = WIDTHS.get(next(iter(event.dtypes()), ""), 4)
    ranks = current_group().world if name == "all_gather" else 1  # its input is one part
    return Operation(name, elements * width * ranks if name in OPS else 0, start, end)
