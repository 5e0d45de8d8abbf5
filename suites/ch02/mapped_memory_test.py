"""Mapped memory: if few rows of a host table are needed, let the kernel read them over PCIe.

Problem    Copy `reads` rows of 256 bytes from a table on the host to the GPU. An index gives the
           rows and their order. The table has `rows` rows, and the index may name a row more than
           once. Both table and index are in pinned host memory. The page measures a curve over
           `reads`.
Baseline   copied: copy the whole table to the GPU, and select the rows there.
Optimized  mapped: changes `copied`. The table is not copied. The kernel that selects the rows gets
           the address of the table in host memory. Pinned memory is mapped into the GPU's address
           space, so each load of a row crosses PCIe.
           gathered: changes `copied`. All threads of torch gather the rows on the CPU into a pinned
           buffer, and only this buffer is copied.
Bound      PCIe. `copied` always moves the whole table. `mapped` moves 256 bytes for each read, even
           if a row is read twice. So `mapped` should be faster if there are fewer reads than rows,
           and copied if there are more. `gathered` moves as many bytes as `mapped`, but the CPU
           selects the rows first. The costs assume that a kernel reads host memory at the rate of
           copies. The cost of `gathered` leaves out the gathering on the CPU, because no rate for
           it was measured.
Seen       On an H200, `mapped` is faster than `copied` with up to a quarter as many reads as rows.
           With as many reads as rows, both take the same time, as predicted. With twice as many,
           `mapped` is slower. `gathered` is already slower than `copied` with as many reads as
           rows. From 2^18 reads on, `mapped` takes a tenth longer than predicted, so a kernel reads
           host memory nearly at the rate of copies. There the time of `mapped` is proportional to
           the number of reads, although many rows are read more than once. So a row that is read
           twice crosses PCIe twice. With 2^14 reads, `mapped` takes about 30 % longer than
           predicted. We did not measure why. `gathered` takes about 40 % longer than predicted with
           up to 2^16 reads, and more than twice as long with 2^18 reads or more. Its cost leaves
           out the gathering on the CPU. We did not time the gathering alone, so we do not know why
           the difference grows between 2^16 and 2^18 reads.
Use when   Only a small part of a table is read, and the table cannot stay on the GPU: it does not
           fit, or the host changes it between reads. Rows should be aligned and at least 128 bytes
           long: each load moves at least 32 bytes, even if fewer are used. Copy the table if most
           of it is read, or if several kernels read it. If the table fits on the GPU and does not
           change, keep it on the GPU. Machines such as GH200 and GB200 connect CPU and GPU by
           NVLink-C2C, so reads from the host are much faster. Measure again on such a machine.
"""

import math

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Sweep, Work, compare

WIDTH = 64  # floats in a row


def inputs(device, rows, reads):
    pinned = device == "cuda"
    table = torch.empty(rows, WIDTH, pin_memory=pinned).copy_(torch.randn(rows, WIDTH))
    index = torch.empty(reads, dtype=torch.int32, pin_memory=pinned)
    return table, index.copy_(torch.randint(rows, (reads,))), device


def reference(table, index, device):
    return table.double()[index.long()].to(device)


class OnTheGpu:
    """The address of a pinned fp32 tensor, in the interface through which torch accepts GPU
    memory."""

    def __init__(self, pinned):
        self.pinned = pinned  # keep a reference, so that the memory is not freed
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape),
            "typestr": "<f4",
            "data": (pinned.data_ptr(), False),
            "version": 3,
        }


def seen_by_gpu(pinned, device):
    """Return a GPU tensor that uses the memory of `pinned`. Without a GPU, return `pinned`."""
    return torch.as_tensor(OnTheGpu(pinned), device=device) if device == "cuda" else pinned


def copied(table, index, device):
    table, index = (t.to(device, non_blocking=True) for t in (table, index))
    return torch.index_select(table, 0, index)


def mapped(table, index, device):
    index = index.to(device, non_blocking=True)
    return torch.index_select(seen_by_gpu(table, device), 0, index)


def gathered(table, index, device):
    rows = torch.empty(len(index), WIDTH, pin_memory=device == "cuda")
    torch.index_select(table, 0, index, out=rows)
    return rows.to(device, non_blocking=True, copy=True)


def row_bytes(count):
    return 4 * WIDTH * count


def different_rows(rows, reads):
    """Return the expected number of different rows in `reads` random draws from `rows` rows."""
    return -rows * math.expm1(reads * math.log1p(-1 / rows)) if rows > 1 else 1


def copied_and_selected(rows, reads):
    copies = Cost(h2d=row_bytes(rows) + 4 * reads, launches=2, host_steps=2)
    return copies + Cost(read=row_bytes(reads), write=row_bytes(reads), launches=1)


def selected_across(rows, reads):
    index = Cost(h2d=4 * reads, launches=1, host_steps=2)
    return index + Cost(h2d=row_bytes(reads), write=row_bytes(reads), launches=1)


@compare(
    baseline=copied,
    optimized=[mapped, gathered],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 2**20, "reads": reads} for reads in (2**14, 2**16, 2**18, 2**20, 2**21)],
    check_sizes=[
        {"rows": 33, "reads": 65},
        {"rows": st.integers(1, 60), "reads": st.integers(1, 90)},
    ],
    work=lambda rows, reads: Work(wire=row_bytes(different_rows(rows, reads))),
    bound="host",
    costs={
        copied: copied_and_selected,
        mapped: selected_across,
        gathered: lambda rows, reads: Cost(h2d=row_bytes(reads), launches=1, host_steps=3),
    },
    sweep=Sweep("reads", judged=[2**16]),
)
def test_mapped_memory(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
