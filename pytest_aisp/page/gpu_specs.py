"""Data about GPUs: the features and limits of each arch, and the names of products.

Code is compiled for an arch, such as ``sm90``, and pytest markers are named after archs. A stored
result belongs to a product. A GPU's compute capability determines the arch. The product name does
not matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

GPU_ARCHS = ("sm90", "sm100", "sm103", "sm121")
ARCHS = ("cpu", *GPU_ARCHS)

GPUS = {
    "sm90": "H100, H200, GH200",
    "sm100": "B200, GB200",
    "sm103": "B300, GB300",
    "sm121": "GB10",
}
"""The names of each arch's products, as text for messages."""

_ASSEMBLED = """
                     sm90  sm100 sm103 sm121
cp_async             +     +     +     +
ldmatrix             +     +     +     +
stmatrix             +     +     +     +
mbarrier             +     +     +     +
elect                +     +     +     +
griddepcontrol       +     +     +     +
setmaxnreg           a     f     f     f
redux_f32            -     f     f     -
f32x2                -     +     +     +
wide_loads           -     +     +     +
bulk_copy            +     +     +     +
tma                  +     +     +     +
tma_gather           -     +     +     +
tensormap_replace    a     f     f     f
clusters             +     +     +     +
dsmem                +     +     +     +
st_async             +     +     +     +
multicast            +     +     +     +
clc                  -     +     +     +
clc_multicast        -     f     f     f
multimem             +     +     +     +
fp8                  +     +     +     +
fp4                  -     f     f     f
mma_block_scale      -     -     -     f
wgmma                a     -     -     -
tmem                 -     f     f     -
tcgen05              -     f     f     -
tcgen05_int8         -     a     -     -
tcgen05_block_scale  -     f     f     -
two_cta              -     f     f     -
"""
# The least specific target that compiles each feature of `features.cu`. The signs mean: + the plain
# target ``sm_100``, f the family target ``sm_100f``, a the arch-specific target ``sm_100a``, - no
# target. A test compares this table with `python benchmarks/feature_probe.py`.


def _parse(table: str) -> dict[str, dict[str, str]]:
    """Return each feature's archs as a mapping from arch to the suffix of the required target."""
    archs, *rows = (line.split() for line in table.split("\n") if line)
    parsed = {}
    for feature, *cells in rows:
        by_arch = zip(archs, cells, strict=True)
        parsed[feature] = {arch: cell.strip("+") for arch, cell in by_arch if cell != "-"}
    return parsed


ASSEMBLED = _parse(_ASSEMBLED)
"""Features that are machine instructions."""

OTHERS: dict[str, dict[str, str]] = {
    "te": dict.fromkeys(GPU_ARCHS, ""),
    "te_mxfp8": dict.fromkeys(("sm100", "sm103"), ""),
    "nvlink": dict.fromkeys(("sm90", "sm100", "sm103"), ""),
    "nvshmem": dict.fromkeys(("sm90", "sm100", "sm103"), ""),
    "shared_227k": dict.fromkeys(("sm90", "sm100", "sm103"), ""),
}
"""Features that are not instructions: libraries, links between GPUs, and limits of a block."""

FEATURES = ASSEMBLED | OTHERS
"""The archs that have each feature, as a mapping from arch to the suffix of the required target."""
# On sm121 the assembler replaces multicast with a function call (`sass_test`).
FEATURES["multicast"] = {a: s for a, s in ASSEMBLED["multicast"].items() if a != "sm121"}

# Code that uses a feature contains at least one of these instructions, with these modifiers. The
# instructions come from disassembled test kernels, which NVRTC 13.5 and Triton 3.9 compiled
# (tests/sass_test.py). Features without a special instruction are not listed: clusters are a launch
# attribute, and ordinary loads read distributed shared memory.
INSTRUCTIONS: dict[str, tuple[str, ...]] = {
    "tma": ("UTMALDG", "UTMASTG", "UTMAREDG"),
    "bulk_copy": ("UBLKCP", "UBLKRED"),
    "multicast": ("UTMALDG.MULTICAST", "UBLKCP.MULTICAST"),
    "st_async": ("STAS",),
    "wgmma": ("HGMMA", "QGMMA", "IGMMA"),
    "tcgen05": ("UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA"),
    "tcgen05_int8": ("UTCIMMA",),
    "mma_block_scale": ("OMMA.SF", "QMMA.SF"),
}


RESERVED_SHARED = 1024
"""Bytes of shared memory that CUDA reserves in each block."""
REGISTER_UNIT = 8
"""Registers per thread are allocated in multiples of this number."""


@dataclass(frozen=True)
class Limits:
    """The limits of a block and of an SM on an arch, and the SM count of the largest product.

    Attributes:
        shared: bytes of shared memory per block, dynamic and static together.
        sms: SMs of the largest product, for the grids of persistent kernels.
        registers: registers per block.
        threads: threads per block.
        per_thread: registers per thread.
        resident_threads, resident_blocks: threads and blocks that an SM can run at once.
    """

    shared: int
    sms: int
    registers: int = 65536
    threads: int = 1024
    per_thread: int = 255
    resident_threads: int = 2048
    resident_blocks: int = 32


# From the CUDA C++ Programming Guide 13, "Technical Specifications per Compute Capability". The SM
# counts are for H200 (132), B200 (148), B300 (160) and GB10 (48).
LIMITS = {
    "sm90": Limits(shared=227 * 1024, sms=132),
    "sm100": Limits(shared=227 * 1024, sms=148),
    "sm103": Limits(shared=227 * 1024, sms=160),
    "sm121": Limits(shared=99 * 1024, sms=48, resident_threads=1536, resident_blocks=24),
}


def capability_of(arch: str) -> tuple[int, int]:
    """Return the compute capability of an arch: (9, 0) for ``sm90``, (12, 1) for ``sm121``."""
    return divmod(int(arch.removeprefix("sm")), 10)


def arch_of(major: int, minor: int) -> str:
    """Return the arch of a compute capability, even an unknown one: ``sm90`` for (9, 0)."""
    return f"sm{major}{minor}"


def product_of(name: str) -> str:
    """Return the product slug of a GPU's name: ``nvidia-h200`` for ``NVIDIA H200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def missing_feature(features: tuple[str, ...], arch: str) -> str | None:
    """Return the first feature that `arch` lacks, such as ``tcgen05 (sm100, sm103)``, or None."""
    for feature in features:
        if arch not in FEATURES[feature]:
            return f"{feature} ({', '.join(a for a in GPU_ARCHS if a in FEATURES[feature])})"
    return None


def target_of(arch: str, features: Iterable[str] = ()) -> str:
    """Return the target to compile for: ``sm_90``, or ``sm_90a`` if one of `features` needs it."""
    suffixes = [FEATURES[feature].get(arch) for feature in features]
    # The arch-specific target (a) accepts everything that the family target (f) accepts.
    return arch.replace("sm", "sm_") + "a" * any(suffixes)
