"""Versions of the libraries that compute, as a worker process has loaded them."""

from __future__ import annotations

import ctypes
import importlib
import os
from typing import Any

VERSIONS = ("torch", "triton", "cudnn", "cublas", "nccl")
"""Whose versions are told; one that is not here, or does not say, is None."""
_CUBLAS_PARTS = 0, 1, 2
"""cuBLAS's MAJOR_VERSION, MINOR_VERSION and PATCH_LEVEL (library_types.h)."""


def versions() -> dict[str, str | None]:
    """Return the versions by name; nothing is loaded for it, and no GPU touched."""
    import torch

    return {
        "torch": str(torch.__version__),
        "triton": version_of("triton"),
        "cudnn": _cudnn(),
        "cublas": _cublas(torch.version.cuda),
        "nccl": _nccl(),
    }


def version_of(package: str) -> str | None:
    """Return the version of a Python package, or None without it."""
    try:
        return str(importlib.import_module(package).__version__)
    except ImportError:
        return None


def _cudnn() -> str | None:
    import torch

    try:
        found = torch.backends.cudnn.version()
    except RuntimeError:  # one of another version than torch was built with
        return None
    return None if found is None else str(found)


def _nccl() -> str | None:
    import torch

    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):  # torch was built without it
        return None


def _cublas(cuda: str | None) -> str | None:
    """Return the version of the cuBLAS that torch has loaded, as the library itself says it."""
    if cuda is None:
        return None
    try:
        library: Any = ctypes.CDLL(f"libcublas.so.{cuda.partition('.')[0]}", os.RTLD_NOLOAD)
        return ".".join(str(_property(library, part)) for part in _CUBLAS_PARTS)
    except (OSError, AttributeError):  # it is not loaded, or is none
        return None


def _property(library: Any, part: int) -> int:
    value = ctypes.c_int()
    if library.cublasGetProperty(part, ctypes.byref(value)):
        raise OSError(f"cublasGetProperty({part}) failed")
    return value.value
