"""Detect replaced functions: clocks, waits, arithmetic, and the functions of this package.

`remember` stores the original functions before a page is loaded, and `replaced` compares them by
identity. `watching` refuses a side that replaces one of them, or that leaves anything else changed.
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
from types import ModuleType

from ..page.pair import SideError
from .global_state import ENVIRONMENT, OWNED, restore, snapshot
from .interference import BackgroundWork
from .protections import enabled

now_ns = time.perf_counter_ns
now = time.perf_counter
"""This package reads these clocks, because a page can replace the functions in `time`."""

WATCHED = ("checking", "isolation", "results", "timing", "util", "worker")
"""The packages whose functions and methods are watched."""
NOT_WATCHED = ("worker.__main__", "worker.client")
"""Modules that are not watched: a program, and the client in pytest's process (runs no side)."""
TORCH = (
    *("cat", "empty", "empty_like", "equal", "full_like", "randint", "segment_reduce", "tensor"),
    *("where", "zeros_like", "linalg.vector_norm", "cuda.synchronize", "cuda.Event"),
    *("cuda.Event.elapsed_time", "cuda.Event.record", "cuda.Event.synchronize"),
    *("cuda.CUDAGraph", "cuda.CUDAGraph.replay", "cuda.CUDAGraph.raw_cuda_graph"),
    *("cuda.Stream", "cuda.current_stream"),
)
COVERAGE_VARIABLES = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "COV_CORE_SOURCE")
"""Environment variables that start coverage or pytest-cov in every new process."""

_Attribute = tuple[object, str]
_originals: dict[str, tuple[_Attribute, object]] = {}


def remember() -> None:
    """Store every watched function as it is now. Call this before a page is loaded."""
    if not _originals:
        for name in watched_modules():
            importlib.import_module(name)
        _originals.update({name: (place, _value(place)) for name, place in _attributes()})


def replaced() -> str | None:
    """Return the name of a watched function that was replaced, or None."""
    changed = (name for name, (place, old) in _originals.items() if _value(place) is not old)
    return next(changed, None)


def put_back() -> None:
    """Restore everything that was replaced."""
    for place, original in _originals.values():
        if _value(place) is not original:
            setattr(*place, original)


def watched_modules() -> list[str]:
    """Return the names of this package's modules that a page must not change."""
    package = __name__.partition(".")[0]
    return [
        f"{package}.{name}.{module.name}"
        for name in WATCHED
        for module in pkgutil.iter_modules(importlib.import_module(f"{package}.{name}").__path__)
        if f"{name}.{module.name}" not in NOT_WATCHED
    ]


def _value(place: _Attribute) -> object:
    return getattr(*place, None)


def _attributes() -> Iterator[tuple[str, _Attribute]]:
    """Yield the name of every watched attribute, and the object that it belongs to."""
    import torch

    for module in (time, math, statistics):
        yield from _functions(module)
    for name in dir(builtins):
        if name.islower() and not name.startswith("_") and callable(getattr(builtins, name)):
            yield name, (builtins, name)
    for name in TORCH:
        *path, last = name.split(".")
        owner: object = torch
        for step in path:
            owner = getattr(owner, step)
        yield f"torch.{name}", (owner, last)
    yield from _methods("random.Random", random.Random)
    yield from _methods("torch.Tensor", torch.Tensor)
    for name in watched_modules():
        yield from _functions(sys.modules[name])


def _functions(module: ModuleType) -> Iterator[tuple[str, _Attribute]]:
    for name, value in vars(module).items():
        if callable(value):
            yield f"{module.__name__}.{name}", (module, name)
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield from _methods(f"{module.__name__}.{name}", value)


def _methods(prefix: str, kind: type) -> Iterator[tuple[str, _Attribute]]:
    for name in dir(kind):
        method = getattr(kind, name, None)
        # Each access to a class method creates a new object, so identity cannot be compared.
        if callable(method) and not name.startswith("__") and method is getattr(kind, name):
            yield f"{prefix}.{name}", (kind, name)
    if "__call__" in vars(kind):
        yield f"{prefix}.__call__", (kind, "__call__")


@contextmanager
def watching(name: str, owns: Sequence[str] = ()) -> Iterator[None]:
    """Refuse the side `name` if it changes settings, leaves work running, or replaces functions.

    Args:
        owns: the things that the page may change, such as ``threads`` (which includes processes),
            ``tf32``, ``gc`` or ``affinity``.

    Raises:
        SideError: if something else was changed. The message names it.
    """
    before, running, tracer = snapshot(), BackgroundWork.now(), active_tracer()
    try:
        yield
        check_clocks(name)
        if enabled("untraced") and (started := active_tracer()) and started != tracer:
            raise SideError(f"{started} was switched on while {name} ran\nMeasure without it")
        if enabled("global-flags"):
            _check_settings(name, before, [what for own in owns for what in OWNED.get(own, ())])
        if enabled("threads") and "threads" not in owns and (left := running.left()):
            raise SideError(f"{name} leaves {left}; that work is not timed")
    finally:
        restore(before)


def check_clocks(name: str) -> None:
    """Refuse the side `name` if clocks, waits or comparisons were replaced."""
    if enabled("own-clock") and (function := replaced()):
        raise SideError(f"{name} replaced {function}; its times and results cannot be trusted")


def _check_settings(name: str, before: Mapping[str, object], owned: Sequence[str]) -> None:
    after = snapshot()
    for setting, old in before.items():
        new = after[setting]
        if new == old or setting in owned:
            continue
        change = f"from {old} to {new}"
        if setting == ENVIRONMENT and isinstance(old, dict) and isinstance(new, dict):
            change = ", ".join(sorted(dict(new.items() ^ old.items())))  # values may be secret
        raise SideError(
            f"{name} changed {setting}: {change}; a side restores every setting that it changes"
        )


class Traced(RuntimeError):
    """A tracer is active in the process that measures."""


def refuse_tracers() -> None:
    """Refuse to time anything while a debugger, coverage or a profiler runs.

    Raises:
        Traced: if one of them runs. The message names it and says how to switch it off.
    """
    if enabled("untraced") and (tracer := active_tracer()):
        variable = next((name for name in COVERAGE_VARIABLES if name in os.environ), None)
        raise Traced(
            f"{tracer} traces the process that measures: it slows Python down many times\n"
            "Measure without it" + (f": unset {variable}" if variable else "")
        )


def active_tracer() -> str | None:
    """Return the name of the debugger, coverage tool or profiler in this process, or None."""
    import torch

    for hook, function in ((sys.gettrace(), "settrace"), (sys.getprofile(), "setprofile")):
        if hook is not None:
            return f"{_module_of(hook)} (sys.{function})"
    if hasattr(sys, "monitoring"):
        for number in range(6):
            if tool := sys.monitoring.get_tool(number):
                return f"{tool} (sys.monitoring)"
    return "torch's profiler" if torch._C._autograd._profiler_enabled() else None


def _module_of(hook: object) -> str:
    """Return the module that a hook comes from, such as ``pdb`` or ``coverage.tracer``."""
    owner = getattr(hook, "__self__", hook)
    return str(getattr(owner, "__module__", None) or type(owner).__module__)
