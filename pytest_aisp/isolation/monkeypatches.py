"""What a page must not replace: clocks, waits, arithmetic, and the functions of this package.

They are remembered once, before a page is loaded, and compared by identity.
"""

from __future__ import annotations

import builtins
import importlib
import math
import os
import pkgutil
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..page.pair import SideError
from .background_work import BackgroundWork
from .global_state import ENVIRONMENT, OWNED, flags, restore
from .protections import enabled

WATCHED = ("checking", "isolation", "results", "timing", "util", "worker")
"""Our packages whose functions and methods are watched, every module of them but these."""
NOT_WATCHED = ("worker.__main__", "worker.client")
"""A program, and the end of the pipe that no side shares a process with."""
TORCH = (
    *("cat", "empty", "empty_like", "equal", "full_like", "randint", "segment_reduce", "tensor"),
    *("where", "zeros_like", "linalg.vector_norm", "cuda.synchronize", "cuda.Event"),
    *("cuda.Event.elapsed_time", "cuda.Event.record", "cuda.Event.synchronize"),
    *("cuda.CUDAGraph", "cuda.CUDAGraph.replay", "cuda.CUDAGraph.raw_cuda_graph"),
    *("cuda.Stream", "cuda.current_stream"),
)

_Place = tuple[Any, str]
_genuine: dict[str, tuple[_Place, Any]] = {}


def remember() -> None:
    """Take everything as it is now. Called once, before a page loads."""
    if not _genuine:
        for name in watched_modules():
            importlib.import_module(name)
        _genuine.update({what: (place, _at(place)) for what, place in _places()})


def replaced() -> str | None:
    """Return the name of something that is not what was remembered, or None."""
    return next((what for what, (at, found) in _genuine.items() if _at(at) is not found), None)


def put_back() -> None:
    """Put everything back that was replaced."""
    for place, found in _genuine.values():
        if _at(place) is not found:
            setattr(*place, found)


def watched_modules() -> list[str]:
    """Return the names of our modules that a page must leave alone, as they are on the disk."""
    package = __name__.partition(".")[0]
    return [
        f"{package}.{name}.{module.name}"
        for name in WATCHED
        for module in pkgutil.iter_modules(importlib.import_module(f"{package}.{name}").__path__)
        if f"{name}.{module.name}" not in NOT_WATCHED
    ]


def _at(place: _Place) -> Any:
    return getattr(*place, None)


def _places() -> Iterator[tuple[str, _Place]]:
    """Yield everything that is watched, by name, with the object that holds it."""
    import torch

    for module in (time, math, statistics):
        yield from _functions(module)
    for name in dir(builtins):
        if name.islower() and not name.startswith("_") and callable(getattr(builtins, name)):
            yield name, (builtins, name)
    for name in TORCH:
        *path, last = name.split(".")
        owner: Any = torch
        for step in path:
            owner = getattr(owner, step)
        yield f"torch.{name}", (owner, last)
    yield from _methods("random.Random", random.Random)
    yield from _methods("torch.Tensor", torch.Tensor)
    for name in watched_modules():
        yield from _functions(sys.modules[name])


def _functions(module: Any) -> Iterator[tuple[str, _Place]]:
    for name, value in vars(module).items():
        if callable(value):
            yield f"{module.__name__}.{name}", (module, name)
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield from _methods(f"{module.__name__}.{name}", value)


def _methods(prefix: str, kind: type) -> Iterator[tuple[str, _Place]]:
    for name in dir(kind):
        method = getattr(kind, name, None)
        # What is made anew at each access, as class methods are, cannot be compared.
        if callable(method) and not name.startswith("__") and method is getattr(kind, name):
            yield f"{prefix}.{name}", (kind, name)
    if "__call__" in vars(kind):
        yield f"{prefix}.__call__", (kind, "__call__")


now_ns = time.perf_counter_ns
now = time.perf_counter
"""The clocks that are read; a page may replace those in `time`, not these."""
STARTS_COVERAGE = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "COV_CORE_SOURCE")
"""The variables with which coverage and pytest-cov start in every process of a user's."""


class Traced(RuntimeError):
    """A tracer runs along with what was to be timed."""


@contextmanager
def watching(name: str, owns: Sequence[str] = ()) -> Iterator[None]:
    """Refuse a side `name` that leaves switches, threads or clocks other than it found them.

    Args:
        owns: what the page declares as its own: ``threads`` (processes too), ``tf32``, ``gc``,
            ``affinity``.

    Raises:
        SideError: naming what was changed.
    """
    before, running, tracer = flags(), BackgroundWork.now(), tracing()
    try:
        yield
        check_clocks(name)
        if enabled("untraced") and (now_on := tracing()) and now_on != tracer:
            raise SideError(f"{now_on} was switched on while {name} ran\nMeasure without it")
        if enabled("global-flags"):
            _check_flags(name, before, [what for own in owns for what in OWNED.get(own, ())])
        if enabled("threads") and "threads" not in owns and (left := running.left()):
            raise SideError(f"{name} leaves {left}; what it does is not timed")
    finally:
        restore(before)


def check_clocks(name: str) -> None:
    """Refuse replaced clocks, waits and comparisons."""
    if enabled("own-clock") and (what := replaced()):
        raise SideError(f"{name} replaced {what}: its times and results are worth nothing")


def refuse_tracers() -> None:
    """Refuse to time anything where a debugger, coverage or a profiler runs along.

    Raises:
        Traced: naming who, and what to do.
    """
    if enabled("untraced") and (tracer := tracing()):
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
    return found or ("torch's profiler" if _torch_profiles() else None)


def _owner(hook: Any) -> str:
    """Return the module that a hook is from: ``pdb``, ``coverage.tracer``."""
    owner = getattr(hook, "__self__", hook)
    return str(getattr(owner, "__module__", None) or type(owner).__module__)


def _torch_profiles() -> bool:
    import torch

    return bool(torch._C._autograd._profiler_enabled())


def _check_flags(name: str, before: Mapping[str, Any], owned: Sequence[str]) -> None:
    after = flags()
    for what, was in before.items():
        if after[what] == was or what in owned:
            continue
        how = f"at {after[what]}, it found {was}"
        if what == ENVIRONMENT:  # by name only: values may be secret
            how = "changed: " + ", ".join(sorted(dict(after[what].items() ^ was.items())))
        raise SideError(
            f"{name} leaves {what} {how}; a side that needs it otherwise sets it and puts it back"
        )
