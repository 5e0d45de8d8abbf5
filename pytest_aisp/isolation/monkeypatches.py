"""What a page must not replace: clocks, waits, arithmetic, and the functions of this package.

They are remembered once, before a page is loaded, and compared by identity.
"""

from __future__ import annotations

import builtins
import importlib
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

OURS = {
    "proof": "check controls fits manners numerics oracle repeats sides witness workbench",
    "bench": "clocks cold cuda engine host kernels memory nodes processes trial windows",
    "guard": "housekeeping leftovers switches",
    "results": "stats timing",
    "common": "trees",
}
"""Our modules whose functions and methods are watched, by room."""
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
        for name in _ours():
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


def _ours() -> list[str]:
    package = __name__.partition(".")[0]
    return [f"{package}.{room}.{name}" for room, names in OURS.items() for name in names.split()]


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
    for name in _ours():
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
