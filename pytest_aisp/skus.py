"""GPUs: what each arch can do, and what a product is called.

An arch is what code is compiled for and the name of a marker; a product is what a stored result
belongs to. Products are mapped by compute capability, never guessed from a name.
"""

from __future__ import annotations

import re

GPU_ARCHS = ("sm90", "sm100", "sm103", "sm121")
ARCHS = ("cpu", *GPU_ARCHS)

_ALL = frozenset(GPU_ARCHS)
_DATACENTER = frozenset({"sm100", "sm103"})
_HOPPER = frozenset({"sm90"})

# Which archs have a feature, by what assembles for them with CUDA 13 (NVRTC 13.0 and newer).
FEATURES: dict[str, frozenset[str]] = {
    "tma": _ALL,
    "clusters": _ALL,
    "dsmem": _ALL,
    "multicast": _ALL,
    "wgmma": _HOPPER,
    "tcgen05": _DATACENTER,
    "mma_block_scale": frozenset({"sm121"}),
    "fp8": _ALL,
    "te": _ALL,
    "te_mxfp8": _DATACENTER,
    "nvlink": frozenset({"sm90", "sm100", "sm103"}),
    "nvshmem": frozenset({"sm90", "sm100", "sm103"}),
}


def arch_of(major: int, minor: int) -> str:
    """Return the arch of a compute capability, ``sm90`` for (9, 0), known to the table or not."""
    return f"sm{major}{minor}"


def product_of(name: str) -> str:
    """Return the product slug of a GPU's name: ``nvidia-h200`` for ``NVIDIA H200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def missing(features: tuple[str, ...], arch: str) -> str | None:
    """Say which of `features` `arch` lacks, as ``tcgen05 (sm100, sm103)``, or None."""
    for feature in features:
        if arch not in FEATURES[feature]:
            return f"{feature} ({', '.join(a for a in GPU_ARCHS if a in FEATURES[feature])})"
    return None
