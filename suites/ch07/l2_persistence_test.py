"""L2 eviction hints: tell the L2 to evict data that is used once before data that is reused.

Problem    Compute out = x + table[index] on 2^20 rows of 128 floats. The kernel streams 1 GiB and
           reuses a table of 24 MiB. Each row of the table is used about 21 times, in random order.
Baseline   normal: no hints, so all lines have the same priority. A warp handles a row, 16 bytes per
           lane.
Optimized  streamed: changes `normal`. x, index and out have evict-first hints (`__ldcs`, `__stcs`).
           kept: changes `streamed`. Loads of the table also have evict-last hints. A second kernel
           sets the table's lines back to normal priority, so that they do not slow down later
           kernels. Each hint applies to one access. No side uses `cudaLimitPersistingL2CacheSize`
           and an access policy window to reserve part of the L2 for the table. So nothing
           guarantees that the table stays in the L2. There is no library variant, because torch has
           no kernel for this sum: `x + table[index]` takes two kernels and moves twice the bytes.
Bound      DRAM. If the table stays in the L2, only x, index and out cross DRAM. A row of the table
           is used again after 49152 other rows on average. The L2 of 50 MB holds the lines of about
           36000 rows, so nearly half of the table's reads go to DRAM again.
Seen       The predictions of `streamed` and `kept` are only roughly right. The predictions assume
           that the table stays in the L2, but both sides gain only a small part of what this would
           save. The measured times would also be plausible if the table were evicted as often as
           without hints. According to NVIDIA, the L2 of the A100 has two partitions, and each
           caches what its own SMs read. If the L2 of an H200 does the same, it keeps the table
           twice. Two copies take nearly the whole L2, and no hint can help. This is a guess: we did
           not try a smaller table or measure the L2 hit rate.
Use when   A kernel reuses a table that fits in the L2 while it streams much more data. Mark the
           streamed data, which costs nothing. Here, marking the table as well gains nothing. Expect
           a small gain, and measure it.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("l2_persistence.cu")
BLOCK = 256
WIDTH, LINE = 128, 32  # floats
# A row of the table is used again after 49152 other rows on average (exponential distribution). The
# L2 is full after 36000 rows (37 MB of stream, 13 MB of table), so a share of exp(-36000 / 49152)
# of the reads misses.
MISSING = 0.48


def inputs(device, rows, entries):
    x, table = (torch.randn(n, WIDTH, device=device) for n in (rows, entries))
    return x, table, torch.randint(entries, (rows,), device=device, dtype=torch.int32)


def reference(x, table, index):
    return x.double() + table.double()[index.long()]


def launch(kernel, x, table, index):
    out = torch.empty_like(x)
    kernel[-(-x.numel() // (4 * BLOCK)), BLOCK](x, table, index, out, len(x))
    return out


def normal(x, table, index):
    return launch(kernels.normal, x, table, index)


def streamed(x, table, index):
    return launch(kernels.streamed, x, table, index)


def kept(x, table, index):
    out = launch(kernels.kept, x, table, index)
    lines = table.numel() // LINE
    kernels.release[-(-lines // BLOCK), BLOCK](table, lines)
    return out


def summed(rows, table):
    """Return the cost of a kernel that reads `table` bytes of the table from DRAM."""
    read = 4 * (WIDTH + 1) * rows + table
    return Cost(read=read, write=4 * WIDTH * rows, ops={"fp32": WIDTH * rows}, launches=1)


def evicted_early(rows, entries):
    return summed(rows, table=max(entries, MISSING * rows) * 4 * WIDTH)


def evicted_never(rows, entries):
    return summed(rows, table=entries * 4 * WIDTH)


@compare(
    baseline=normal,
    optimized=[
        Variant(streamed, sass=("LDG.EF.128", "STG.EF.128")),
        # evict_last is a value in a register, so no instruction shows it. `release` becomes
        # CCTL.DML2.
        Variant(kept, sass=("LDG.EF.128", "STG.EF.128", "CCTL.DML2")),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 2**20, "entries": 49152}],
    check_sizes=[
        {"rows": 33, "entries": 5},
        {"rows": 1023, "entries": 300},
        {"rows": st.integers(1, 300), "entries": st.integers(1, 100)},
    ],
    work=lambda rows, entries: Work(
        read=4 * (WIDTH * (rows + entries) + rows),
        write=4 * WIDTH * rows,
        flops={"fp32": WIDTH * rows},
    ),
    bound="dram",
    costs={
        normal: evicted_early,
        streamed: evicted_never,
        kept: lambda rows, entries: evicted_never(rows, entries) + Cost(launches=1),
    },
)
def test_l2_persistence(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
