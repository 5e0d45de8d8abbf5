"""Global settings of torch and the process that affect the results or times of later code.

`snapshot` reads all settings, and `restore` resets changed settings. A page may change torch's
settings when it is imported. `settings_of` limits these changes to the page.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from inspect import isclass, isfunction
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..page.sources import libraries

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

ENVIRONMENT = "environment variables"
PERSISTING_L2 = "the GPU's bytes of persisting L2"
OWNED = {
    "tf32": (
        *("torch's float32 matmul precision", "torch's cudnn.allow_tf32"),
        *("torch's cuda.matmul.fp32_precision", "torch's cudnn.conv.fp32_precision"),
        *("torch's cudnn.rnn.fp32_precision", "torch's mkldnn.matmul.fp32_precision"),
        *("torch's mkldnn.conv.fp32_precision", "torch's mkldnn.rnn.fp32_precision"),
    ),
    "threads": ("torch's threads", "torch's MKL threads"),
    "onednn": ("torch's oneDNN",),
    "affinity": ("the CPU affinity",),
    "gc": ("Python's garbage collection",),
    "l2_persistence": (PERSISTING_L2,),
}
"""The settings that a page may change, keyed by the word in its ``owns=``."""
MIXED = "mixed"
"""The value of a setting that torch refuses to read, because torch's old and new APIs disagree."""

# Prefixes of environment variables that libraries read when they start or load something.
_WATCHED = (
    *("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "OMP_", "GOMP_", "KMP_", "MKL_"),
    *("OPENBLAS_", "PYTORCH_", "TORCH_", "MALLOC_", "LD_", "PYTHON"),
)
# Environment variables that torch and Inductor set themselves.
_SET_BY_TORCH = (
    *("CUDA_MODULE_LOADING", "CUDA_HOME", "CUBLAS_WORKSPACE_CONFIG", "KMP_DUPLICATE_LIB_OK"),
    "TORCH_WARM_POOL",
)


@dataclass(frozen=True)
class Setting(Generic[T]):
    """The functions that read and write one global setting."""

    read: Callable[[], T]
    write: Callable[[T], object]


Settings = dict[str, Setting[Any]]


def snapshot() -> dict[str, object]:
    """Return the value of every setting by name."""
    return {name: setting.read() for name, setting in _settings().items()}


def restore(before: Mapping[str, object]) -> None:
    """Reset every setting that has changed to its value in `before`."""
    for name, setting in _settings().items():
        # CUDA adds settings when it is initialized, so `before` may lack some of them.
        if name in before and setting.read() != before[name]:
            with suppress(OSError):  # only root can raise a priority
                setting.write(before[name])


def _settings() -> Settings:
    """Return all settings by name. A setting that changes other settings comes before them."""
    torch_settings = {**_modes(), **_precision(), **_behavior(), **_hooks()}
    named = {f"torch's {name}": setting for name, setting in torch_settings.items()}
    return {**named, **_persisting_l2(), **_process()}


def _persisting_l2() -> Settings:
    """Return the setting for the L2 size reserved for persisting data, if CUDA is initialized."""
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

    return {PERSISTING_L2: Setting(read, write)}


def _modes() -> Settings:
    """Return the depths of torch's mode stacks. An active mode intercepts every operation."""
    from torch import _C

    def unwind(depth: Callable[[], int], pop: Callable[[], object]) -> Setting[int]:
        def write(wanted: int) -> None:
            while depth() > wanted:
                pop()

        return Setting(depth, write)

    return {
        "modes": unwind(_C._len_torch_function_stack, _C._pop_torch_function_stack),
        "dispatch modes": unwind(
            _C._len_torch_dispatch_stack, lambda: _C._pop_torch_dispatch_stack(None)
        ),
    }


def _precision() -> Settings:
    import torch

    backends = torch.backends
    matmul = backends.cuda.matmul
    settings: Settings = {
        "float32 matmul precision": _unless_mixed(
            Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
        ),
        "cudnn.allow_tf32": _unless_mixed(_attribute(backends.cudnn, "allow_tf32")),
        "default dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
        "flush denormals": Setting(_flushes_denormals, torch.set_flush_denormal),
    }
    for dtype in ("bf16", "fp16"):
        name = f"allow_{dtype}_reduced_precision_reduction"
        settings[f"reduced-precision {dtype} sums"] = _attribute(matmul, name)
    for device in ("cuda", "cpu"):
        settings[f"autocast on {device}"] = Setting(
            functools.partial(torch.is_autocast_enabled, device),
            functools.partial(torch.set_autocast_enabled, device),
        )
    for library in ("cuda", "cudnn", "mkldnn"):
        for kind in ("matmul", "conv", "rnn"):
            owner = getattr(getattr(backends, library), kind, None)
            if hasattr(owner, "fp32_precision"):
                settings[f"{library}.{kind}.fp32_precision"] = _attribute(owner, "fp32_precision")
    return settings


def _unless_mixed(setting: Setting[Any]) -> Setting[Any]:
    """Return `setting`, but with the value `MIXED` if torch cannot read it."""

    def read() -> object:
        try:
            return setting.read()
        except RuntimeError:
            return MIXED

    def write(value: object) -> None:
        if value != MIXED:
            setting.write(value)

    return Setting(read, write)


def _behavior() -> Settings:
    import torch

    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    settings: Settings = {
        "default device": Setting(torch.get_default_device, _set_default_device),
        "grad mode": Setting(torch.is_grad_enabled, torch.set_grad_enabled),
        "anomaly detection": Setting(torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        "deterministic algorithms": Setting(
            torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
        ),
        "threads": Setting(torch.get_num_threads, torch.set_num_threads),
        "MKL threads": Setting(_mkl_threads, _set_mkl_threads),
        "oneDNN": _attribute(torch.backends.mkldnn, "enabled"),
        "mkldnn.deterministic": _attribute(torch.backends.mkldnn, "deterministic"),
        "NNPACK": Setting(torch._C._get_nnpack_enabled, torch._C._set_nnpack_enabled),
        "opt_einsum": _attribute(torch.backends.opt_einsum, "enabled"),
        "quantized engine": _attribute(torch.backends.quantized, "engine"),
    }
    for name in ("enabled", "benchmark", "deterministic"):
        settings[f"cudnn.{name}"] = _attribute(cudnn, name)
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        settings[f"{kind} attention"] = Setting(
            getattr(cuda, f"{kind}_sdp_enabled"), getattr(cuda, f"enable_{kind}_sdp")
        )
    return settings


def _hooks() -> Settings:
    """Return the number of hooks in each table of torch's global module hooks."""
    from torch.nn.modules import module

    names = [name for name in vars(module) if name.startswith("_global") and "hooks" in name]
    tables = [table for name in names if isinstance(table := getattr(module, name), dict)]

    def trim(counts: list[int]) -> None:
        for table, count in zip(tables, counts, strict=True):
            while len(table) > count:
                table.popitem()

    return {"module hooks": Setting(lambda: [len(table) for table in tables], trim)}


def _process() -> Settings:
    settings: Settings = {
        "Python's garbage collection": Setting(
            lambda: (gc.isenabled(), gc.get_threshold()), _set_collection
        ),
        "Python's switch interval": Setting(sys.getswitchinterval, sys.setswitchinterval),
        "the process's priority": Setting(
            lambda: os.getpriority(os.PRIO_PROCESS, 0),
            lambda priority: os.setpriority(os.PRIO_PROCESS, 0, priority),
        ),
        ENVIRONMENT: Setting(_environment, _set_environment),
    }
    if hasattr(os, "sched_getaffinity"):
        settings["the CPU affinity"] = Setting(
            lambda: os.sched_getaffinity(0), lambda cores: os.sched_setaffinity(0, cores)
        )
    return settings


def _attribute(owner: object, name: str) -> Setting[object]:
    return Setting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _flushes_denormals() -> bool:
    import torch

    return float(torch.tensor(1e-310, dtype=torch.float64, device="cpu") * 1.0) == 0.0


def _mkl_threads() -> int:
    """Return the number of threads that MKL uses, or 0 if torch was built without it."""
    import torch

    text = torch.__config__.parallel_info()
    found = re.search(r"mkl_get_max_threads\(\) : (\d+)", text)
    return int(found[1]) if found else 0


def _set_mkl_threads(count: int) -> None:
    import torch

    # MKL's thread-local number overrides the number of the process. 0 removes the override.
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    library.MKL_Set_Num_Threads_Local(0)
    if _mkl_threads() != count:
        torch.set_num_threads(torch.get_num_threads())


def _set_default_device(device: torch.device) -> None:
    import torch

    # Any default device, even the CPU, adds a mode that slows every call. None removes the mode.
    torch.set_default_device(None if str(device) == "cpu" else device)


def _set_collection(state: tuple[bool, tuple[int, int, int]]) -> None:
    enabled, thresholds = state
    if enabled:
        gc.enable()
    else:
        gc.disable()
    gc.set_threshold(*thresholds)


def _environment() -> dict[str, str]:
    variables = os.environ.items()
    return {k: v for k, v in variables if k.startswith(_WATCHED) and k not in _SET_BY_TORCH}


def _set_environment(before: Mapping[str, str]) -> None:
    for name in _environment().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


_LASTING = "torch's modes", "torch's dispatch modes", "torch's module hooks"
"""Settings that can be undone, but not applied a second time."""

_before_imports: dict[str, object] = {}
_changed_by_imports: dict[str, dict[str, object]] = {}
"""The settings that changed when a page was imported. The keys are the page and the modules that no
earlier page had imported. A later page that uses one of these modules gets the module's settings
too.
"""


@contextmanager
def settings_of(module: str, root: str) -> Iterator[None]:
    """Apply only the settings of the page `module`. The ``with`` block imports the page."""
    if not _before_imports:
        _before_imports.update(_settings_of_torch())
    restore(_before_imports)
    known = set(sys.modules)
    yield
    after = _settings_of_torch()
    changed = {
        name: value for name, value in after.items() if value != _before_imports.get(name, value)
    }
    if changed:
        new = sys.modules.keys() - known
        _changed_by_imports.update(
            {name: changed for name in new if _is_under(sys.modules[name], root)}
        )
    used = {module, *_modules_in(sys.modules[module])}
    own = [settings for name, settings in _changed_by_imports.items() if name in used]
    restore({**_before_imports, **{name: value for each in own for name, value in each.items()}})


def _settings_of_torch() -> dict[str, object]:
    settings = snapshot()
    return {k: v for k, v in settings.items() if k.startswith("torch's ") and k not in _LASTING}


def _is_under(module: ModuleType, root: str) -> bool:
    file = str(getattr(module, "__file__", ""))
    return file.startswith(root + os.sep) and not file.startswith(libraries())


def _modules_in(page: ModuleType) -> Iterator[str]:
    """Yield the names of the modules that a page imports, or imports functions or classes from."""
    for value in vars(page).values():
        if isinstance(value, ModuleType):
            yield value.__name__
        elif isfunction(value) or isclass(value):
            yield value.__module__
