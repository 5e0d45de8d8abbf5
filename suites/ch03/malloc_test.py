"""Malloc: keep freed memory in the process.

Problem    Turn a batch of uint8 images into fp32 on the CPU. A data loader does this for every
           batch. The result is larger than 32 MiB. It is freed before the next call, or soon after
           the next call starts. On a CPU, torch first converts the images in a separate step, so
           there is a second large block.
Baseline   returned: glibc's default. A block of more than 32 MiB always comes from the Linux
           kernel, and is returned to the kernel when it is freed. So each call takes a page fault
           for every page. A page has 4 KiB, or 2 MiB if the kernel's setting for huge pages is
           `always`. The kernel also fills each new page with zeros.
Optimized  kept: changes `returned`. `MALLOC_MMAP_MAX_=0` makes large blocks come from the heap.
           `MALLOC_TRIM_THRESHOLD_` keeps the heap from shrinking when the block at its end is
           freed. `MALLOC_TRIM_THRESHOLD_` alone makes no difference.
           jemalloc: changes `returned`. `jemalloc` is preloaded with `dirty_decay_ms:-1`, so it
           never returns pages to the kernel. Without this setting, `jemalloc` returns large blocks
           when they are freed.
           jemalloc_advised: changes `jemalloc`. The settings are from guides for torch, which set a
           large decay time instead of -1. For large blocks, jemalloc treats any decay time above 0
           as 0, so it keeps none of them.
           tcmalloc: changes `returned`. `tcmalloc` is preloaded. By default, it keeps freed pages
           and returns them to the kernel little by little.
Bound      DRAM limits `kept`, which only reads and writes both blocks. `returned` also waits for
           the Linux kernel.
Use when   A process repeatedly allocates large host tensors, and its memory may stay at the peak. A
           program that reuses its buffers needs no setting (`../ch01/preallocated_test.py`). Blocks
           below 32 MiB gain little: after the first such block is freed, glibc raises its threshold
           and keeps blocks of this size. If many threads allocate, `jemalloc` and `tcmalloc` also
           reduce contention, which this page does not measure.
"""

from pathlib import Path

import pytest
import torch

from pytest_aisp import Cost, Variant, Work, compare, fresh_process

FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
FOLDERS += ("/usr/local/lib",)


def library(*names):
    """Return the path of the first shared library in `names` that is installed, or None."""
    paths = (Path(folder, name) for name in names for folder in FOLDERS)
    return next((str(path) for path in paths if path.exists()), None)


JEMALLOC = library("libjemalloc.so.2")
TCMALLOC = library("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
DEFAULT = {
    **dict.fromkeys(("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")),
    **dict.fromkeys(("MALLOC_CONF", "GLIBC_TUNABLES", "LD_PRELOAD")),
}
KEPT = {**DEFAULT, "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
NEVER = "dirty_decay_ms:-1"
ADVISED = (
    "oversize_threshold:1,background_thread:true,metadata_thp:auto"
    ",dirty_decay_ms:9000000000,muzzy_decay_ms:9000000000"
)


def installed(path, package):
    """Return a pytest mark that skips a variant if its library is missing."""
    return pytest.mark.skipif(path is None, reason=f"not installed: apt install {package}")


WITH_JEMALLOC = installed(JEMALLOC, "libjemalloc2")
WITH_TCMALLOC = installed(TCMALLOC, "libtcmalloc-minimal4")


def inputs(device, count, side):
    return (torch.randint(256, (count, 3, side, side), device=device, dtype=torch.uint8),)


def reference(batch):
    return batch.double() / 255


@fresh_process(environment=DEFAULT)
def returned(batch):
    return batch / 255


@fresh_process(environment=KEPT)
def kept(batch):
    return batch / 255


@fresh_process(environment={**DEFAULT, "LD_PRELOAD": JEMALLOC, "MALLOC_CONF": NEVER})
def jemalloc(batch):
    return batch / 255


@fresh_process(environment={**DEFAULT, "LD_PRELOAD": JEMALLOC, "MALLOC_CONF": ADVISED})
def jemalloc_advised(batch):
    return batch / 255


@fresh_process(environment={**DEFAULT, "LD_PRELOAD": TCMALLOC})
def tcmalloc(batch):
    return batch / 255


def scaled(count, side):
    values = 3 * count * side**2
    converted = Cost(read=values, write=4 * values)
    return converted + Cost(read=4 * values, write=4 * values, ops={"fp32": values})


@compare(
    baseline=returned,
    optimized=[
        kept,
        Variant(jemalloc, at_least="yardstick", marks=[WITH_JEMALLOC]),
        Variant(jemalloc_advised, at_least="yardstick", marks=[WITH_JEMALLOC]),
        Variant(tcmalloc, at_least="yardstick", marks=[WITH_TCMALLOC]),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[],
    check_sizes=[{"count": 3, "side": 15}],
    cpu_sizes=[{"count": 64, "side": 224}],
    work=lambda count, side: Work(
        read=3 * count * side**2,
        write=12 * count * side**2,
        flops={"fp32": 3 * count * side**2},
    ),
    bound="dram",
    costs=dict.fromkeys((returned, kept, jemalloc, jemalloc_advised, tcmalloc), scaled),
    at_least={"cpu": 1.2},
)
def test_malloc(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
