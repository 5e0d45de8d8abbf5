"""What a profiler saw in a stretch of steps: the GPU's work, and where the host waited for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..bench.kernels import union

BODY = "aisp.body"
"""The annotation around a step's work, from its batch to the next request."""
ITEM, COPY = "aten::_local_scalar_dense", "aten::copy_"
"""Operators: `.item()`, `float()`, `bool()` and the like; and every copy."""
BLOCKS = re.compile(r"\w*Synchronize|cudaMemcpy(Async)?")
"""Calls of the runtime and the driver in which the host waits; a copy of pageable memory too."""
FUSIBLE = re.compile(r"elementwise|reduce_kernel|multi_tensor_apply|layer_norm|softmax", re.I)
"""PyTorch's kernels that move more than they compute: what a fusing compiler merges."""


class Event(NamedTuple):
    """One thing that the profiler saw, in seconds; an annotation is no work."""

    name: str
    start: float
    end: float
    on_gpu: bool = False
    annotation: bool = False


@dataclass(frozen=True)
class Gpu:
    """What a step is for the GPU, in seconds a step, the mean of `steps` profiled ones.

    Attributes:
        busy: at least one kernel, copy or fill was at work; kernels, copies: one of these was.
        uploads: copies from the host's memory while no kernel was at work; pageable: those from
            memory that is not pinned.
        stalls: the host waited for the GPU within the step's work; item, copy: in `.item()` and
            in copies.
        fusible: elementwise, reducing and normalizing kernels of PyTorch were at work.
        launches, items: how many kernels, and how many `.item()`.
        memory, used: bytes of the GPU, and the most that PyTorch had reserved; 0 for unknown.
    """

    steps: int
    busy: float = 0.0
    kernels: float = 0.0
    copies: float = 0.0
    uploads: float = 0.0
    pageable: float = 0.0
    stalls: float = 0.0
    item: float = 0.0
    copy: float = 0.0
    fusible: float = 0.0
    launches: float = 0.0
    items: float = 0.0
    memory: int = 0
    used: int = 0


Span = tuple[float, float]


def summarize(events: Iterable[Event], steps: int, *, memory: int = 0, used: int = 0) -> Gpu | None:
    """Return what `steps` steps were for the GPU, or None where it had nothing to do."""
    seen = list(events)
    work = [e for e in seen if e.on_gpu and not e.annotation]
    host = [e for e in seen if not e.on_gpu]
    if not work:
        return None
    kernels = [e for e in work if not e.name.startswith(("Memcpy", "Memset"))]
    copies = [e for e in work if e.name.startswith("Memcpy")]
    return Gpu(
        steps,
        busy=_seconds(work, steps),
        kernels=_seconds(kernels, steps),
        copies=_seconds(copies, steps),
        uploads=_exposed([e for e in copies if "HtoD" in e.name], kernels, steps),
        pageable=_exposed([e for e in copies if "(Pageable ->" in e.name], kernels, steps),
        fusible=_seconds([e for e in kernels if FUSIBLE.search(e.name)], steps),
        launches=len(kernels) / steps,
        items=sum(e.name == ITEM for e in host) / steps,
        memory=memory,
        used=used,
        **_waits(host, steps),
    )


def _waits(host: Sequence[Event], steps: int) -> dict[str, float]:
    bodies = _spans(e for e in host if e.name == BODY)
    blocks = inside(_spans(e for e in host if BLOCKS.fullmatch(e.name)), bodies)
    item = inside(blocks, _spans(e for e in host if e.name == ITEM))
    # .item() copies too, but not through aten::copy_; float(x.cpu()) waits in the copy alone.
    copy = inside(blocks, _spans(e for e in host if e.name == COPY))
    named = {"stalls": blocks, "item": item, "copy": copy}
    return {name: union(spans) / steps for name, spans in named.items()}


def inside(spans: Iterable[Span], outer: Iterable[Span]) -> list[Span]:
    """Return those `spans` that lie in one of `outer`."""
    around = list(outer)
    return [s for s in spans if any(start <= s[0] and s[1] <= end for start, end in around)]


def _spans(events: Iterable[Event]) -> list[Span]:
    return [(e.start, e.end) for e in events]


def _seconds(events: Iterable[Event], steps: int) -> float:
    return union(_spans(events)) / steps


def _exposed(copies: Sequence[Event], kernels: Sequence[Event], steps: int) -> float:
    return _seconds([*copies, *kernels], steps) - _seconds(kernels, steps)
