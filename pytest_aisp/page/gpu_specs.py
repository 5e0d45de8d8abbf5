"""GPUs: what each arch can do, and what a product is called.

An arch is what code is compiled for and the name of a marker; a product is what a stored result
belongs to. Products are mapped by compute capability, never guessed from a name.
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
"""Which products have an arch, in words."""

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
# What the assembler says of `features.cu`, for the least of three targets that takes it: + is
# the plain ``sm_100``, f the family's ``sm_100f``, a the arch's own ``sm_100a``, - none of them.
# `python benchmarks/feature_probe.py` derives it, and a test.


def _read(table: str) -> dict[str, dict[str, str]]:
    """Return by feature which archs have it, each with the suffix that its target needs."""
    archs, *rows = (line.split() for line in table.split("\n") if line)
    cells = {feature: zip(archs, found, strict=True) for feature, *found in rows}
    return {f: {a: s.strip("+") for a, s in row if s != "-"} for f, row in cells.items()}


ASSEMBLED = _read(_ASSEMBLED)
"""Features that are instructions."""

OTHERS: dict[str, dict[str, str]] = {
    "te": dict.fromkeys(GPU_ARCHS, ""),
    "te_mxfp8": dict.fromkeys(("sm100", "sm103"), ""),
    "nvlink": dict.fromkeys(("sm90", "sm100", "sm103"), ""),
    "nvshmem": dict.fromkeys(("sm90", "sm100", "sm103"), ""),
}
"""Features that no assembler knows of: libraries, and wires between GPUs."""

EMULATED = {"multicast": ("sm121",)}
"""What an arch assembles to a call of the assembler's own, not to an instruction (`sass_test`)."""

FEATURES = {
    feature: {a: s for a, s in archs.items() if a not in EMULATED.get(feature, ())}
    for feature, archs in (ASSEMBLED | OTHERS).items()
}
"""Which archs have a feature."""


# What a feature is in machine code: at least one of these instructions, with these modifiers. Found
# by disassembling probes of NVRTC 13.5 and Triton 3.9 (tests/sass_test.py). A feature without a
# line has no instruction of its own, or none that was looked for: clusters are a launch attribute,
# remote shared memory is read by an ordinary load.
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
"""Bytes of shared memory that CUDA keeps of each block."""
REGISTER_UNIT = 8
"""Registers are given to a warp in units of 8 a thread."""


@dataclass(frozen=True)
class Limits:
    """What a block may use on an arch, and how many processors its largest product has.

    Attributes:
        shared: bytes of shared memory of a block, dynamic and static together.
        registers: of a block; threads: of a block; per_thread: registers of a thread.
        processors: for the grids of kernels that stay on their processor.
        resident_threads, resident_blocks: of a processor at once; its shared memory is that of a
            block and `RESERVED_SHARED` more.
    """

    shared: int
    processors: int
    registers: int = 65536
    threads: int = 1024
    per_thread: int = 255
    resident_threads: int = 2048
    resident_blocks: int = 32


# CUDA C++ Programming Guide 13, "Technical Specifications per Compute Capability"; processors: H200
# 132, B200 148, B300 160, GB10 48.
LIMITS = {
    "sm90": Limits(shared=227 * 1024, processors=132),
    "sm100": Limits(shared=227 * 1024, processors=148),
    "sm103": Limits(shared=227 * 1024, processors=160),
    "sm121": Limits(shared=99 * 1024, processors=48, resident_threads=1536, resident_blocks=24),
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


def target_of(arch: str, features: Iterable[str] = ()) -> str:
    """Return what to compile for on `arch`: ``sm_90a`` where one of `features` needs it."""
    suffixes = [FEATURES[feature].get(arch) for feature in features]
    # What a family's target takes the arch's own does too, and it is this arch that will run it.
    return arch.replace("sm", "sm_") + "a" * any(suffixes)
