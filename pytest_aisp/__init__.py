"""pytest-aisp: GPU performance benchmarks as pytest cases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .build import cuda_module
    from .graphs import capture
    from .marks import compare
    from .pair import Variant, Work
    from .processes import fresh_process
    from .tma import tensor_map

__all__ = [
    "Variant",
    "Work",
    "capture",
    "compare",
    "cuda_module",
    "fresh_process",
    "tensor_map",
]

_HOME = {
    "Variant": "pair",
    "Work": "pair",
    "capture": "graphs",
    "compare": "marks",
    "cuda_module": "build",
    "fresh_process": "processes",
    "tensor_map": "tma",
}


def __getattr__(name: str) -> Any:
    # Lazy, so that pytest can load the plugin without loading what pages need.
    from importlib import import_module

    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
