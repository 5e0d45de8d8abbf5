"""CUDA graphs for pages: capture what a callable launches, replay it with one launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

WARMUP = 3


def capture(step: Callable[[], Any], *, pool: Any = None) -> Callable[[], Any]:
    """Capture `step` in a CUDA graph and return a callable that replays it.

    `step` runs three times first on a side stream, so that whatever it makes lazily exists. The
    returned callable returns `step`'s outputs, which every replay overwrites. Without a GPU it is
    `step` itself, so that the page's results can be checked anywhere.

    Args:
        pool: memory that several graphs share (`torch.cuda.graph_pool_handle()`); by default the
            graph has its own. Graphs that share are replayed one after the other.

    Source: PyTorch's notes on CUDA graphs ("CUDA semantics").
    """
    import torch

    if not torch.cuda.is_available():
        return step
    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        outputs = step()

    def replay() -> Any:
        graph.replay()
        return outputs

    return replay


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    """Return the stream on which everything is captured: cuBLAS keeps a workspace for each."""
    import torch

    return torch.cuda.Stream(device)
