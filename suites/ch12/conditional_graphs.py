"""CUDA graphs with conditional nodes, built by cuda.core. PyTorch has no function for them."""

from __future__ import annotations

import contextlib
import ctypes
from importlib import import_module
from typing import Any

import torch

NEEDED = "conditional nodes need a driver for CUDA 12.4 or newer"


def old_driver(needed: int = 12040) -> bool:
    """Return whether the installed driver is too old for CUDA `needed` (12040 is 12.4)."""
    try:
        driver, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return False
    return driver.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value < needed


def begun_graph() -> Any:
    """Return a `cuda.core.GraphBuilder` that captures the work launched on its stream."""
    torch.cuda.synchronize()
    device = import_module("cuda.core").Device(torch.cuda.current_device())
    device.set_current()
    return device.create_graph_builder().begin_building()


def stream_of(builder: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context in which torch's current stream is the stream that `builder` captures."""
    stream = torch.cuda.ExternalStream(int(builder.stream.handle))
    return torch.cuda.stream(stream)


def launch_graph(graph: Any) -> None:
    """Launch a `cuda.core.Graph` on torch's current stream."""
    handle = torch.cuda.current_stream().cuda_stream
    graph.launch(import_module("cuda.core").Stream.from_handle(handle))
