"""What a side must leave alone: torch's global switches, threads, and the clocks that time it.

The references to clocks and waits are taken when this module is imported, before any page is.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .protections import on
from .sides import SideError

now_ns = time.perf_counter_ns
now = time.perf_counter
"""The clocks that are read; a page may replace those in `time`, not these."""
TF32 = ("float32 matmul precision", "cudnn.allow_tf32")
"""The switches that a page with ``owns=["tf32"]`` may leave as it likes."""


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Return where Python's and torch's own code lies; everything else is somebody's page."""
    import torch

    standard = [sysconfig.get_paths()[k] for k in ("stdlib", "platlib", "purelib")]
    return (*standard, os.path.dirname(os.path.dirname(torch.__file__)))


def _clocks() -> dict[str, Any]:
    import torch

    watched = {
        "time.perf_counter": time.perf_counter,
        "time.perf_counter_ns": time.perf_counter_ns,
        "time.monotonic": time.monotonic,
        "torch.cuda.synchronize": torch.cuda.synchronize,
        "torch.cuda.Event": torch.cuda.Event,
        "torch.cuda.CUDAGraph": torch.cuda.CUDAGraph,
        "torch.equal": torch.equal,
        "torch.linalg.vector_norm": torch.linalg.vector_norm,
        "torch.Tensor.isfinite": torch.Tensor.isfinite,
        "torch.Tensor.sub_": torch.Tensor.sub_,
        "torch.Tensor.copy_": torch.Tensor.copy_,
        "torch.Tensor.double": torch.Tensor.double,
        "torch.Tensor.to": torch.Tensor.to,
    }
    return watched


_genuine: dict[str, Any] = {}


def remember() -> None:
    """Take the clocks, waits and comparisons as they are now. Called once, before a page loads."""
    if not _genuine:
        _genuine.update(_clocks())


def flags() -> dict[str, Any]:
    """Return torch's global switches that change results or times."""
    import torch

    matmul = torch.backends.cuda.matmul
    return {
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "reduced-precision bf16 sums": matmul.allow_bf16_reduced_precision_reduction,
        "reduced-precision fp16 sums": matmul.allow_fp16_reduced_precision_reduction,
        "default dtype": str(torch.get_default_dtype()),
        "grad mode": torch.is_grad_enabled(),
        "autocast": (torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "flush denormals": _flushes_denormals(),
        "threads": torch.get_num_threads(),
    }


def _flushes_denormals() -> bool:
    import torch

    return float(torch.tensor(1e-310, dtype=torch.float64) * 1.0) == 0.0


@contextmanager
def watching(name: str, owns: Sequence[str] = ()) -> Iterator[None]:
    """Refuse a side `name` that leaves switches, threads or clocks other than it found them.

    Args:
        owns: what the page declares as its own: ``threads``, ``tf32``.

    Raises:
        SideError: naming what was changed.
    """
    before, threads = flags(), set(threading.enumerate())
    yield
    try:
        check_clocks(name)
        if on("global-flags"):
            _check_flags(name, before, TF32 if "tf32" in owns else ())
        if on("threads") and "threads" not in owns:
            _check_threads(name, threads)
    finally:
        restore(before)


def check_clocks(name: str) -> None:
    """Refuse replaced clocks, waits and comparisons, and a tracer beside what is timed."""
    if on("own-clock"):
        for what, found in _clocks().items():
            if _genuine.get(what, found) is not found:
                raise SideError(f"{name} replaced {what}: its times and results are worth nothing")
    if on("untraced") and (tracer := tracing()):
        raise SideError(f"{tracer} is on: it slows Python down many times\nMeasure without it")


def tracing() -> str | None:
    """Return who traces this process's Python: a debugger, coverage, a profiler; or None."""
    hooks: dict[str, Callable[[], Any]] = {
        "a tracer (sys.settrace)": sys.gettrace,
        "a profiler (sys.setprofile)": sys.getprofile,
    }
    found = next((what for what, hook in hooks.items() if hook() is not None), None)
    monitoring = getattr(sys, "monitoring", None)
    if found is None and monitoring is not None:
        tools = filter(None, map(monitoring.get_tool, range(6)))
        found = next((f"{tool} (sys.monitoring)" for tool in tools), None)
    return found


def _check_flags(name: str, before: dict[str, Any], owned: Sequence[str]) -> None:
    after = flags()
    for what, value in before.items():
        if after[what] != value and what not in owned:
            raise SideError(
                f"{name} leaves torch's {what} at {after[what]}, it found {value}; a side that"
                " needs it otherwise sets it and puts it back"
            )


def _check_threads(name: str, before: set[threading.Thread]) -> None:
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread not in before and _at_work(frames.get(thread.ident or 0)):
            raise SideError(
                f"{name} leaves a thread at work after its call: {thread.name}; what it does is"
                " not timed"
            )


def _at_work(frame: types.FrameType | None) -> bool:
    """Return whether a page's code is on this stack; idle pools have torch's and Python's alone."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_libraries()) and not file.startswith("<"):
            return True
        frame = frame.f_back
    return False


def put_back() -> None:
    """Put the remembered clocks, waits and comparisons back where they were."""
    for what, genuine in _genuine.items():
        *path, name = what.split(".")
        owner: Any = sys.modules[path[0]]
        for step in path[1:]:
            owner = getattr(owner, step)
        if getattr(owner, name) is not genuine:
            setattr(owner, name, genuine)


def restore(before: dict[str, Any]) -> None:
    """Put torch's global switches back as `flags` found them, those that results depend on."""
    import torch

    torch.set_float32_matmul_precision(before["float32 matmul precision"])
    torch.set_grad_enabled(before["grad mode"])
    torch.set_num_threads(before["threads"])
    torch.set_default_dtype(getattr(torch, before["default dtype"].removeprefix("torch.")))
