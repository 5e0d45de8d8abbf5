"""What a side must leave alone: torch's global switches, threads, and the clocks that time it.

The references to clocks and waits are taken when this module is imported, before any page is.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .protections import on
from .sides import SideError
from .sources import libraries

now_ns = time.perf_counter_ns
now = time.perf_counter
"""The clocks that are read; a page may replace those in `time`, not these."""
STARTS_COVERAGE = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "COV_CORE_SOURCE")
"""The variables with which coverage and pytest-cov start in every process of a user's."""
TF32 = ("float32 matmul precision", "cudnn.allow_tf32")
PERSISTING_L2 = "bytes of persisting L2"
OWNED = {"tf32": TF32, "threads": ("threads",), "l2_persistence": (PERSISTING_L2,)}
"""By what a page owns: the switches that it may leave as it likes."""


class Traced(RuntimeError):
    """A tracer runs along with what was to be timed."""


def _clocks() -> dict[str, Any]:
    import torch

    watched = {
        "time.perf_counter": time.perf_counter,
        "time.perf_counter_ns": time.perf_counter_ns,
        "time.monotonic": time.monotonic,
        "torch.cuda.synchronize": torch.cuda.synchronize,
        "torch.cuda.Event": torch.cuda.Event,
        "torch.cuda.Event.elapsed_time": torch.cuda.Event.elapsed_time,
        "torch.cuda.Event.record": torch.cuda.Event.record,
        "torch.cuda.Event.synchronize": torch.cuda.Event.synchronize,
        "torch.cuda.CUDAGraph": torch.cuda.CUDAGraph,
        "torch.cuda.CUDAGraph.replay": torch.cuda.CUDAGraph.replay,
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


Switch = tuple[Callable[[], Any], Callable[[Any], None]]


def _switches() -> dict[str, Switch]:
    """Return how torch's global switches that change results or times are read and set."""
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "float32 matmul precision": (
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        ),
        "cudnn.allow_tf32": _attribute(cudnn, "allow_tf32"),
        "cudnn.benchmark": _attribute(cudnn, "benchmark"),
        "reduced-precision bf16 sums": _attribute(matmul, "allow_bf16_reduced_precision_reduction"),
        "reduced-precision fp16 sums": _attribute(matmul, "allow_fp16_reduced_precision_reduction"),
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "grad mode": (torch.is_grad_enabled, lambda on: _none(torch.set_grad_enabled(on))),
        "autocast on cuda": _autocast("cuda"),
        "autocast on cpu": _autocast("cpu"),
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
        ),
        "flush denormals": (_flushes_denormals, lambda on: _none(torch.set_flush_denormal(on))),
        "threads": (torch.get_num_threads, torch.set_num_threads),
        **_l2_switches(),
    }


def _l2_switches() -> dict[str, Switch]:
    """Return the share of the L2 that is set aside for persisting data, where there is a GPU."""
    import torch

    if not torch.cuda.is_initialized():
        return {}
    from cuda.bindings import runtime

    limit = runtime.cudaLimit.cudaLimitPersistingL2CacheSize

    def read() -> int:
        status, value = runtime.cudaDeviceGetLimit(limit)
        return int(value) if status == runtime.cudaError_t.cudaSuccess else 0

    def write(value: int) -> None:
        runtime.cudaDeviceSetLimit(limit, value)
        runtime.cudaCtxResetPersistingL2Cache()

    return {PERSISTING_L2: (read, write)}


def _attribute(owner: Any, name: str) -> Switch:
    return (lambda: getattr(owner, name)), (lambda value: setattr(owner, name, value))


def _autocast(device: str) -> Switch:
    import torch

    return (
        lambda: torch.is_autocast_enabled(device),
        lambda on: torch.set_autocast_enabled(device, on),
    )


def _none(_: object) -> None:
    """Drop what a setter returns."""


def _flushes_denormals() -> bool:
    import torch

    return float(torch.tensor(1e-310, dtype=torch.float64) * 1.0) == 0.0


def flags() -> dict[str, Any]:
    """Return torch's global switches as they are."""
    return {what: read() for what, (read, _) in _switches().items()}


def restore(before: dict[str, Any]) -> None:
    """Put every switch that has moved back to where `flags` found it."""
    switches = _switches()
    for what, value in before.items():
        read, write = switches[what]
        if read() != value:
            write(value)


@contextmanager
def watching(name: str, owns: Sequence[str] = ()) -> Iterator[None]:
    """Refuse a side `name` that leaves switches, threads or clocks other than it found them.

    Args:
        owns: what the page declares as its own: ``threads``, ``tf32``.

    Raises:
        SideError: naming what was changed.
    """
    before, threads, tracer = flags(), set(threading.enumerate()), tracing()
    try:
        yield
        check_clocks(name)
        if on("untraced") and (now_on := tracing()) and now_on != tracer:
            raise SideError(f"{now_on} was switched on while {name} ran\nMeasure without it")
        if on("global-flags"):
            _check_flags(name, before, [s for o in owns for s in OWNED.get(o, ())])
        if on("threads") and "threads" not in owns:
            _check_threads(name, threads)
    finally:
        restore(before)


def check_clocks(name: str) -> None:
    """Refuse replaced clocks, waits and comparisons."""
    if on("own-clock"):
        for what, found in _clocks().items():
            if _genuine.get(what, found) is not found:
                raise SideError(f"{name} replaced {what}: its times and results are worth nothing")


def refuse_tracers() -> None:
    """Refuse to time anything where a debugger, coverage or a profiler runs along.

    Raises:
        Traced: naming who, and what to do.
    """
    if on("untraced") and (tracer := tracing()):
        started = next((name for name in STARTS_COVERAGE if name in os.environ), None)
        raise Traced(
            f"{tracer} traces the process that measures: it slows Python down many times\n"
            "Measure without it" + (f": unset {started}" if started else "")
        )


def tracing() -> str | None:
    """Return who traces this process's Python: a debugger, coverage, a profiler; or None."""
    hooks = {"settrace": sys.gettrace(), "setprofile": sys.getprofile()}
    names = (f"{_owner(hook)} (sys.{by})" for by, hook in hooks.items() if hook is not None)
    found = next(names, None)
    monitoring = getattr(sys, "monitoring", None)
    if found is None and monitoring is not None:
        tools = filter(None, map(monitoring.get_tool, range(6)))
        found = next((f"{tool} (sys.monitoring)" for tool in tools), None)
    return found


def _owner(hook: Any) -> str:
    """Return the module that a hook is from: ``pdb``, ``coverage.tracer``."""
    owner = getattr(hook, "__self__", hook)
    return str(getattr(owner, "__module__", None) or type(owner).__module__)


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
        if not file.startswith(libraries()) and not file.startswith("<"):
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
