"""Huge pages: let the Linux kernel map large host buffers in pages of 2 MiB.

Problem    Two uses of large buffers on the CPU. test_huge_pages turns a batch of uint8 images into
           fp32. The result is larger than 32 MiB, so malloc maps new memory for it at every call.
           torch first converts the images in a separate step, so there is a second large buffer.
           test_lookups adds up random rows of a table that is allocated only once.
Baseline   small_pages: the default. The kernel maps each 4 KiB page at its first touch.
           table_in_small_pages: the table is in pages of 4 KiB.
Optimized  torch_setting: changes `small_pages`. With `THP_MEM_ALLOC_ENABLE=1`, torch calls
           `madvise` with `MADV_HUGEPAGE` for every tensor of 2 MiB or more that it allocates.
           malloc_setting: changes `small_pages`. With `GLIBC_TUNABLES=glibc.malloc.hugetlb=1`
           (glibc 2.35 or newer; an older glibc ignores it), malloc calls `madvise` for all memory
           that it gets from the kernel, not only for tensors.
           table_in_huge_pages: changes `table_in_small_pages`. torch's setting is on.
Bound      Memory. A huge page takes one page fault, and the same memory in small pages takes 512. A
           huge page also needs only one TLB entry, so reading random rows of a large table needs
           fewer page table walks. In both cases, the kernel fills the same number of bytes with
           zeros.
Use when   The machine's setting for transparent huge pages is `madvise`, and large host buffers are
           allocated repeatedly, or are read at random. There is no gain if the setting is `always`,
           if memory is so fragmented that the kernel finds no huge pages, or if buffers are reused.
           Reused buffers are better than huge pages (`malloc_test.py`). Huge pages that are only
           partly used waste memory.
"""

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare, fresh_process

BAG, WIDTH = 32, 16  # rows per sum, and floats per row


def kernel_setting():
    """Return the kernel's setting for transparent huge pages, such as ``madvise``."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "missing"
    return re.search(r"\[(\w+)\]", text)[1]


ADVISABLE = pytest.mark.skipif(
    kernel_setting() != "madvise",
    reason=f"transparent huge pages are {kernel_setting()!r} here, so advice changes nothing; as"
    " root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
)
DEFAULT = {"THP_MEM_ALLOC_ENABLE": None, "GLIBC_TUNABLES": None}
BY_TORCH = {**DEFAULT, "THP_MEM_ALLOC_ENABLE": "1"}
BY_MALLOC = {**DEFAULT, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def images(device, count, side):
    return (torch.randint(256, (count, 3, side, side), device=device, dtype=torch.uint8),)


def scaled_reference(batch):
    return batch.double() / 255


@fresh_process(environment=DEFAULT)
def small_pages(batch):
    return batch / 255


@fresh_process(environment=BY_TORCH)
def torch_setting(batch):
    return batch / 255


@fresh_process(environment=BY_MALLOC)
def malloc_setting(batch):
    return batch / 255


def scaled(count, side):
    values = 3 * count * side**2
    converted = Cost(read=values, write=4 * values)
    return converted + Cost(read=4 * values, write=4 * values, ops={"fp32": values})


@compare(
    baseline=small_pages,
    optimized=[Variant(side, marks=[ADVISABLE]) for side in (torch_setting, malloc_setting)],
    inputs=images,
    reference=scaled_reference,
    sizes=[],
    check_sizes=[{"count": 3, "side": 15}],
    cpu_sizes=[{"count": 64, "side": 224}],
    work=lambda count, side: Work(
        read=3 * count * side**2,
        write=12 * count * side**2,
        flops={"fp32": 3 * count * side**2},
    ),
    bound="dram",
    costs=dict.fromkeys((small_pages, torch_setting, malloc_setting), scaled),
    at_least={"cpu": 1.2},
)
def test_huge_pages(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


def table_and_bags(device, rows, bags):
    """Return a table, and for each bag the indices of the table rows to add up."""
    bagged = torch.randint(rows, (bags, BAG), device=device)
    return torch.randn(rows, WIDTH, device=device), bagged


def sums_reference(table, bagged):
    return table.double()[bagged].sum(1)


@fresh_process(environment=DEFAULT)
def table_in_small_pages(table, bagged):
    return F.embedding_bag(bagged, table, mode="sum")


@fresh_process(environment=BY_TORCH)
def table_in_huge_pages(table, bagged):
    return F.embedding_bag(bagged, table, mode="sum")


def looked_up(rows, bags):
    found = bags * BAG
    return Cost(
        read=4 * WIDTH * min(found, rows) + 8 * found,
        write=4 * WIDTH * bags,
        ops={"fp32": WIDTH * found},
    )


@compare(
    baseline=table_in_small_pages,
    optimized=[Variant(table_in_huge_pages, marks=[ADVISABLE])],
    inputs=table_and_bags,
    reference=sums_reference,
    sizes=[],
    check_sizes=[{"rows": 133, "bags": 7}],
    cpu_sizes=[{"rows": 1 << 21, "bags": 1 << 15}],
    work=lambda rows, bags: Work(
        read=8 * bags * BAG, write=4 * WIDTH * bags, flops={"fp32": WIDTH * bags * (BAG - 1)}
    ),
    bound="dram",
    costs={table_in_small_pages: looked_up, table_in_huge_pages: looked_up},
    at_least="neutral",
)
def test_lookups(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
