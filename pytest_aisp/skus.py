"""GPUs: what each arch can do, and what a product is called.

An arch is what code is compiled for and the name of a marker; a product is what a stored result
belongs to. Products are mapped by compute capability, never guessed from a name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
    "multicast": _HOPPER | _DATACENTER,  # sm121 assembles it to a call into the driver
    "wgmma": _HOPPER,
    "tcgen05": _DATACENTER,
    "mma_block_scale": frozenset({"sm121"}),
    "fp8": _ALL,
    "te": _ALL,
    "te_mxfp8": _DATACENTER,
    "nvlink": frozenset({"sm90", "sm100", "sm103"}),
    "nvshmem": frozenset({"sm90", "sm100", "sm103"}),
}

# What a feature is in machine code: at least one of these instructions, with these modifiers. Found
# by disassembling probes of NVRTC 13.5 and Triton 3.9 (tests/sass_test.py). A feature without a
# line has no instruction of its own: clusters are a launch attribute, remote shared memory is read
# by an ordinary load.
INSTRUCTIONS: dict[str, tuple[str, ...]] = {
    "tma": ("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED"),
    "multicast": ("UTMALDG.MULTICAST", "UBLKCP.MULTICAST"),
    "wgmma": ("HGMMA", "QGMMA", "IGMMA"),
    "tcgen05": ("UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA"),
    "mma_block_scale": ("OMMA.SF", "QMMA.SF"),
}


@dataclass(frozen=True)
class Limits:
    """What a block may use on an arch, and how many processors its largest product has.

    Attributes:
        shared: bytes of shared memory of a block, dynamic and static together.
        registers: of a block; threads: of a block; per_thread: registers of a thread.
        processors: for the grids of kernels that stay on their processor.
    """

    shared: int
    processors: int
    registers: int = 65536
    threads: int = 1024
    per_thread: int = 255


# CUDA C++ Programming Guide 13, "Technical Specifications per Compute Capability"; processors: H200
# 132, B200 148, B300 160, GB10 48.
LIMITS = {
    "sm90": Limits(shared=227 * 1024, processors=132),
    "sm100": Limits(shared=227 * 1024, processors=148),
    "sm103": Limits(shared=227 * 1024, processors=160),
    "sm121": Limits(shared=99 * 1024, processors=48),
}


def capability_of(arch: str) -> tuple[int, int]:
    """Return the compute capability of an arch: (9, 0) for ``sm90``, (12, 1) for ``sm121``."""
    number = int(arch.removeprefix("sm"))
    return number // 10, number % 10


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
