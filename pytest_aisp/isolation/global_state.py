"""Global switches that change results or times of whatever runs next: torch's and the process's.

`flags` reads them all, `restore` puts back those that have moved.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

ENVIRONMENT = "environment variables"
PERSISTING_L2 = "the GPU's bytes of persisting L2"
OWNED = {
    "tf32": (
        *("torch's float32 matmul precision", "torch's cudnn.allow_tf32"),
        *("torch's cuda.matmul.fp32_precision", "torch's cudnn.conv.fp32_precision"),
        *("torch's cudnn.rnn.fp32_precision", "torch's mkldnn.matmul.fp32_precision"),
        *("torch's mkldnn.conv.fp32_precision", "torch's mkldnn.rnn.fp32_precision"),
    ),
    "threads": ("torch's threads",),
    "affinity": ("the CPU affinity",),
    "gc": ("Python's garbage collection",),
    "l2_persistence": (PERSISTING_L2,),
}
"""The switches that a page may leave as it likes, by what it says in ``owns=``."""
MIXED = "mixed"
"""What is read where torch refuses to say: it was set by both of its interfaces."""

Switch = tuple[Callable[[], Any], Callable[[Any], None]]

# Read by the libraries below us whenever something starts or is loaded.
_READ = (
    *("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "OMP_", "GOMP_", "KMP_", "MKL_"),
    *("OPENBLAS_", "PYTORCH_", "TORCH_", "MALLOC_", "LD_", "PYTHON"),
)
# What torch and Inductor set for themselves.
_THEIRS = (
    *("CUDA_MODULE_LOADING", "CUDA_HOME", "CUBLAS_WORKSPACE_CONFIG", "KMP_DUPLICATE_LIB_OK"),
    "TORCH_WARM_POOL",
)


def flags() -> dict[str, Any]:
    """Return the switches as they are."""
    return {what: read() for what, (read, _) in _switches().items()}


def restore(before: Mapping[str, Any]) -> None:
    """Put every switch that has moved back to where `flags` found it."""
    for what, (read, write) in _switches().items():
        # What is new was not there to be moved: CUDA has been initialised meanwhile.
        if what in before and read() != before[what]:
            with suppress(OSError):  # a higher priority is root's to give back
                write(before[what])


def _switches() -> dict[str, Switch]:
    """Return how each switch is read and set; what sets others too comes before them."""
    torchs = {**_modes(), **_precision(), **_behaviour(), **_hooks()}
    named = {f"torch's {what}": switch for what, switch in torchs.items()}
    return {**named, **_l2(), **_process()}


def _l2() -> dict[str, Switch]:
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


def _modes() -> dict[str, Switch]:
    """Return the stacks of active modes, which see every operation: they come off first."""
    import torch

    stacks = torch._C
    return {
        "modes": _stack(stacks._len_torch_function_stack, stacks._pop_torch_function_stack),
        "dispatch modes": _stack(
            stacks._len_torch_dispatch_stack, lambda: stacks._pop_torch_dispatch_stack(None)
        ),
    }


def _precision() -> dict[str, Switch]:
    import torch

    backends = torch.backends
    matmul, cudnn = backends.cuda.matmul, backends.cudnn
    found: dict[str, Switch] = {
        "float32 matmul precision": (
            _or_mixed(torch.get_float32_matmul_precision),
            torch.set_float32_matmul_precision,
        ),
        "cudnn.allow_tf32": _attribute(cudnn, "allow_tf32"),
        "reduced-precision bf16 sums": _attribute(matmul, "allow_bf16_reduced_precision_reduction"),
        "reduced-precision fp16 sums": _attribute(matmul, "allow_fp16_reduced_precision_reduction"),
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "flush denormals": (_flushes_denormals, lambda on: _none(torch.set_flush_denormal(on))),
        "autocast on cuda": _autocast("cuda"),
        "autocast on cpu": _autocast("cpu"),
    }
    for library in ("cuda", "cudnn", "mkldnn"):
        for kind in ("matmul", "conv", "rnn"):
            owner = getattr(getattr(backends, library), kind, None)
            if hasattr(owner, "fp32_precision"):
                found[f"{library}.{kind}.fp32_precision"] = _attribute(owner, "fp32_precision")
    return found


def _behaviour() -> dict[str, Switch]:
    import torch

    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "cudnn.enabled": _attribute(cudnn, "enabled"),
        "cudnn.benchmark": _attribute(cudnn, "benchmark"),
        "cudnn.deterministic": _attribute(cudnn, "deterministic"),
        "flash attention": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        "memory-efficient attention": (
            cuda.mem_efficient_sdp_enabled,
            cuda.enable_mem_efficient_sdp,
        ),
        "plain attention": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
        "cudnn attention": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        "default device": (torch.get_default_device, _set_default_device),
        "grad mode": (torch.is_grad_enabled, lambda on: _none(torch.set_grad_enabled(on))),
        "anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
        ),
        "threads": (torch.get_num_threads, torch.set_num_threads),
    }


def _hooks() -> dict[str, Switch]:
    """Return the hooks that run with every module of everybody."""
    from torch.nn.modules import module

    names = [name for name in vars(module) if name.startswith("_global") and "hooks" in name]
    tables = [table for name in names if isinstance(table := getattr(module, name), dict)]

    def trim(counts: list[int]) -> None:
        for table, count in zip(tables, counts, strict=True):
            while len(table) > count:
                table.popitem()

    return {"module hooks": (lambda: [len(table) for table in tables], trim)}


def _process() -> dict[str, Switch]:
    found: dict[str, Switch] = {
        "Python's garbage collection": (
            lambda: (gc.isenabled(), gc.get_threshold()),
            _set_collection,
        ),
        "Python's switch interval": (sys.getswitchinterval, sys.setswitchinterval),
        "the process's priority": (
            lambda: os.getpriority(os.PRIO_PROCESS, 0),
            lambda priority: os.setpriority(os.PRIO_PROCESS, 0, priority),
        ),
        ENVIRONMENT: (_environment, _set_environment),
    }
    if hasattr(os, "sched_getaffinity"):
        found["the CPU affinity"] = (
            lambda: os.sched_getaffinity(0),
            lambda cores: os.sched_setaffinity(0, cores),
        )
    return found


def _stack(depth: Callable[[], int], pop: Callable[[], Any]) -> Switch:
    def unwind(to: int) -> None:
        while depth() > to:
            pop()

    return depth, unwind


def _or_mixed(read: Callable[[], str]) -> Callable[[], str]:
    def asked() -> str:
        try:
            return read()
        except RuntimeError:
            return MIXED

    return asked


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

    return float(torch.tensor(1e-310, dtype=torch.float64, device="cpu") * 1.0) == 0.0


def _set_default_device(device: Any) -> None:
    import torch

    # Set to a device, even to the CPU, it stays active as a mode and slows every call.
    torch.set_default_device(None if str(device) == "cpu" else device)


def _set_collection(state: tuple[bool, tuple[int, int, int]]) -> None:
    (gc.enable if state[0] else gc.disable)()
    gc.set_threshold(*state[1])


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k.startswith(_READ) and k not in _THEIRS}


def _set_environment(before: Mapping[str, str]) -> None:
    for name in _environment().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
