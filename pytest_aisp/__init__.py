"""pytest-aisp: GPU performance benchmarks as pytest cases."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .judging.judge import judge
    from .kernels.arguments import tensor_map
    from .kernels.cuda_cpp import cuda_module
    from .page.cost import Cost
    from .page.declare import compare
    from .page.pair import Conditions, Sweep, Variant, Work
    from .timing.cuda_graph import capture
    from .training_loop.watch import bottleneck
    from .worker.process_timer import fresh_process

__all__ = [
    "Conditions",
    "Cost",
    "Sweep",
    "Variant",
    "Work",
    "bottleneck",
    "capture",
    "compare",
    "cuda_module",
    "fresh_process",
    "judge",
    "tensor_map",
]

_HOME = {
    "Conditions": "page.pair",
    "Cost": "page.cost",
    "Sweep": "page.pair",
    "Variant": "page.pair",
    "Work": "page.pair",
    "bottleneck": "training_loop.watch",
    "capture": "timing.cuda_graph",
    "compare": "page.declare",
    "cuda_module": "kernels.cuda_cpp",
    "fresh_process": "worker.process_timer",
    "judge": "judging.judge",
    "tensor_map": "kernels.arguments",
}


def __getattr__(name: str) -> object:
    # Imported on first use, so pytest can load the plugin without the modules that pages need.
    from importlib import import_module

    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
