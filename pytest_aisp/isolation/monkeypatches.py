"""Detect replaced functions: clocks, waits, arithmetic, and the functions of this package.

`remember` stores the original functions and their code before a page is loaded, and `replaced`
compares them by identity. `watching` refuses a side that replaces a watched function, changes a
constant of this package, or does not reset a setting.
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
from copy import copy
from types import FunctionType, ModuleType
from typing import Any

from ..page.pair import SideError
from ..page.sources import libraries
from .global_state import ENVIRONMENT, OWNED, restore, snapshot
from .interference import BackgroundWork
from .protections import enabled
from .setters import Change, changes_inside, install

now_ns = time.perf_counter_ns
now = time.perf_counter
cpu_now = time.process_time
"""The clocks that this package calls. A page could replace the functions in `time`."""

WATCHED = ("checking", "isolation", "judging", "results", "timing", "util", "worker")
"""The packages whose functions and methods are watched."""
NOT_WATCHED = ("worker.__main__",)
"""Modules that are not watched, because they are programs."""
TORCH = (
    *("cat", "empty", "empty_like", "equal", "full_like", "randint", "segment_reduce", "tensor"),
    *("where", "zeros_like", "linalg.vector_norm", "cuda.synchronize", "cuda.Event"),
    *("cuda.Event.elapsed_time", "cuda.Event.record", "cuda.Event.synchronize"),
    *("cuda.CUDAGraph", "cuda.CUDAGraph.replay", "cuda.CUDAGraph.raw_cuda_graph"),
    *("cuda.Stream", "cuda.current_stream"),
)
TORCH_MODULES = ("torch", "torch.nn.functional", "torch.linalg", "torch.fft")
"""The modules whose functions a side must not replace, because other sides call them too."""
REPLACED_BY_TORCH = ("manual_seed",)
"""The functions that torch itself replaces, when it imports Dynamo."""
COVERAGE_VARIABLES = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "COV_CORE_SOURCE")
"""Environment variables that start coverage or pytest-cov in every new process."""

_Attribute = tuple[object, str]
_originals: dict[str, tuple[_Attribute, object]] = {}
_codes: dict[str, tuple[Any, tuple[object, object, object]]] = {}
"""Each function of this package, with its code, its defaults and its keyword defaults."""
_Constants = dict[str, tuple[_Attribute, Any, Any]]
"""The constants of this package. The last value is a copy if a constant can change in place."""
_torch_originals: dict[tuple[Any, str], object] = {}


def remember() -> None:
    """Store what is watched in its current form. Call this before a page is loaded."""
    install()
    if not _originals:
        for name in watched_modules():
            importlib.import_module(name)
        _originals.update({name: (place, _value(place)) for name, place in _attributes()})
        _codes.update(_codes_now())
        _torch_originals.update(_torch_functions())


def replaced() -> str | None:
    """Return the name of a watched function that was replaced, or whose code was, or None."""
    for name, ((owner, attribute), original) in _originals.items():
        if getattr(owner, attribute, None) is not original:  # for thousands: without a call
            return name
    for name, (function, (code, defaults, keywords)) in _codes.items():
        same = function.__code__ is code and function.__defaults__ is defaults
        if not same or function.__kwdefaults__ != keywords:
            return f"the code of {name}"
    return None


def _replaced_by_a_page() -> str | None:
    """Return the name of a function of torch that a page's own code has replaced, or None.

    Replacements by libraries are allowed, because some libraries patch torch when they are
    imported.
    """
    for (owner, attribute), original in _torch_originals.items():
        value = getattr(owner, attribute, None)
        if value is original:
            continue
        code = getattr(value, "__code__", None)
        if code and not code.co_filename.startswith(libraries()):
            return _torch_name((owner, attribute))
    return None


def put_back() -> None:
    """Restore all watched functions that were replaced."""
    for place, original in _originals.values():
        if _value(place) is not original:
            setattr(*place, original)
    for function, (code, defaults, keywords) in _codes.values():
        function.__code__, function.__defaults__ = code, defaults
        function.__kwdefaults__ = copy(keywords)


def _restore_constants(before: _Constants) -> str | None:
    """Restore all constants, and return the name of one that was changed, or None."""
    found = None
    for name, ((owner, attribute), original, content) in before.items():
        if getattr(owner, attribute, None) is not original:
            setattr(owner, attribute, original)
            found = name
        if original is not content and original != content:
            original.clear()
            (original.extend if isinstance(original, list) else original.update)(content)
            found = name
    return found


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


def _codes_now() -> dict[str, tuple[Any, tuple[object, object, object]]]:
    """Return each watched function of this package by its own name, with what it runs."""
    functions = [value for _, value in _originals.values() if isinstance(value, FunctionType)]
    package = __name__.partition(".")[0]
    return {
        f"{f.__module__}.{f.__qualname__}": (
            f,
            (f.__code__, f.__defaults__, copy(f.__kwdefaults__)),
        )
        for f in functions
        if f.__module__.startswith(f"{package}.")
    }


def _constants_now() -> Iterator[tuple[str, tuple[_Attribute, Any, Any]]]:
    for module in map(sys.modules.__getitem__, watched_modules()):
        for name, value in vars(module).items():
            if name.isupper() and not name.startswith("__"):
                content = copy(value) if isinstance(value, dict | list | set) else value
                yield f"{module.__name__}.{name}", ((module, name), value, content)


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
        watched = callable(method) or isinstance(method, property)
        if watched and not name.startswith("__") and method is getattr(kind, name):
            yield f"{prefix}.{name}", (kind, name)
    if "__call__" in vars(kind):
        yield f"{prefix}.__call__", (kind, "__call__")


@contextmanager
def watching(name: str, owns: Sequence[str] = ()) -> Iterator[None]:
    """Refuse the side `name` if it changes settings, leaves work running, or replaces functions.

    The side runs in the ``with`` block.

    Args:
        owns: the settings that the page is allowed to change, such as ``threads`` (which includes
            processes), ``tf32``, ``gc`` or ``affinity``.

    Raises:
        SideError: if anything else was changed. The message names the change.
    """
    if enabled("own-clock") and (function := replaced() or _replaced_by_a_page()):
        raise SideError(
            f"{function} was replaced before {name} ran; times and results cannot be trusted\n"
            "The import of the page, its inputs or its reference must not replace it"
        )
    before, running, tracer = snapshot(), BackgroundWork.now(), active_tracer()
    functions, changes = _torch_functions(), len(changes_inside())
    constants = dict(_constants_now()) if enabled("own-clock") else {}
    owned = [what for own in owns for what in OWNED.get(own, ())]
    try:
        yield
        _check_functions(name, functions, constants)
        if enabled("untraced") and (started := active_tracer()) and started != tracer:
            raise SideError(f"{started} was switched on while {name} ran\nMeasure without it")
        if enabled("global-flags"):
            _check_settings(name, before, owned)
        if enabled("steady-settings"):
            _check_changes(name, changes_inside()[changes:], owned)
        if enabled("threads") and "threads" not in owns and (left := running.left()):
            raise SideError(f"{name} leaves {left}; that work is not timed")
    finally:
        restore(before)


def _check_functions(
    name: str, before: Mapping[tuple[Any, str], object], constants: _Constants
) -> None:
    """Refuse the side `name` if clocks, waits, comparisons or functions of torch were replaced."""
    if not enabled("own-clock"):
        return
    constant = _restore_constants(constants)
    function = replaced() or constant
    for (module, attribute), original in before.items():
        if getattr(module, attribute, None) is not original:
            function = function or _torch_name((module, attribute))
            setattr(module, attribute, original)
    if function:
        raise SideError(f"{name} replaced {function}; its times and results cannot be trusted")


def _torch_functions() -> dict[tuple[Any, str], object]:
    """Return the functions in `TORCH_MODULES` and all `forward` methods of torch, by place."""
    import torch

    functions = {
        (module, name): value
        for module in (sys.modules[name] for name in TORCH_MODULES)
        for name, value in vars(module).items()
        if callable(value) and not isinstance(value, type) and name not in REPLACED_BY_TORCH
    }
    kinds = [kind for kind in vars(torch.nn.modules).values() if isinstance(kind, type)]
    forwards = {(k, "forward"): vars(k)["forward"] for k in kinds if "forward" in vars(k)}
    return {**functions, **forwards}


def _torch_name(place: tuple[Any, str]) -> str:
    owner, name = place
    return f"{'torch.nn.' if isinstance(owner, type) else ''}{owner.__name__}.{name}"


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


def _check_changes(name: str, changes: Sequence[Change], owned: Sequence[str]) -> None:
    """Refuse the side `name` if it changed a setting in a call, even if it reset the setting."""
    for change in changes:
        if change.setting in owned:
            continue
        word = next((word for word, settings in OWNED.items() if change.setting in settings), None)
        remedy = f'if the page is about that: conditions=Conditions(owns=["{word}"])'
        raise SideError(
            f"{name} changes {change}\nThe two sides then do not run under the same settings."
            f" Remove it{', or declare it ' + remedy if word else ''}"
        )


class Traced(RuntimeError):
    """A tracer is active in the process that measures."""


def refuse_tracers() -> None:
    """Raise `Traced` if a debugger, a coverage tool or a profiler runs in this process.

    Raises:
        Traced: the message names the tool and says how to switch it off.
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
