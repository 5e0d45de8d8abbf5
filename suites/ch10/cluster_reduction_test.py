"""Reduction over a cluster: 8 blocks share a sum through shared memory and read their row once.

Problem    Divide each row of n fp32 elements by the root of its mean square (RMS norm without
           weights). A row of 65536 elements is 256 KiB, more than an SM's shared memory, so 8
           blocks share a row. No block can write results until all 8 blocks have read their parts.
Baseline   atomics: a fill sets the sum of each row to zero. Then one kernel adds each block's sum
           of squares to the sum of its row. A second kernel reads x again and divides it.
Optimized  two_passes: changes `atomics`. The blocks store their sums, and the second kernel adds
           the 8 sums of a row.
           distributed: changes `two_passes`. In one kernel, the 8 blocks of a row form a cluster
           and read each other's sums from shared memory. The kernel then reads x again, and may
           find it in the L2.
           kept: changes `distributed`. x stays in shared memory, so it is read once.
           library: `torch.nn.functional.rms_norm`, whose kernel also reads x twice.
Bound      DRAM. x is ten times as large as the L2, so a second kernel reads it from DRAM again. The
           sides with two kernels read 8 bytes per element and write 4. `kept` reads 4 bytes.
           `distributed` also reads 4 bytes if all second reads hit the L2. In `distributed` and
           `kept`, an SM holds 6 blocks, so some of its blocks move data while others wait at a
           cluster's barrier. In `atomics` and `two_passes`, an SM can hold 8 blocks.
Seen       `distributed` takes longer than predicted. The difference in time between `distributed`
           and `kept` suggests that about half of the second reads miss the L2. The blocks process
           99 rows (26 MB) at a time, and the results take another 26 MB. Together, they fill the L2
           (50 MB), so part of a row is probably evicted before the second read. We did not check
           this with hardware counters.
Use when   Several blocks need a common result and read their data twice, and the data fits in the
           shared memory of a cluster. The gain comes from reading the data once, not from the way
           in which sums are exchanged. In most models, a row fits in one SM and needs no cluster.
"""

from dataclasses import replace

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("cluster_reduction.cu")
BLOCK, BLOCKS, EPS = 256, 8, 1e-6


def inputs(device, rows, n):
    return (torch.randn(rows, n, device=device),)


def reference(x):
    return x.double() / (x.double().square().mean(dim=1, keepdim=True) + EPS).sqrt()


def atomics(x):
    (rows, n), out = x.shape, torch.empty_like(x)
    sums = torch.zeros(rows, device=x.device)
    kernels.add_squares[(BLOCKS, rows), BLOCK](x, sums, n)
    kernels.divide_by_sum[(BLOCKS, rows), BLOCK](x, sums, out, n)
    return out


def two_passes(x):
    (rows, n), out = x.shape, torch.empty_like(x)
    parts = torch.empty(rows, BLOCKS, device=x.device)
    kernels.store_squares[(BLOCKS, rows), BLOCK](x, parts, n)
    kernels.divide_by_parts[(BLOCKS, rows), BLOCK](x, parts, out, n)
    return out


def distributed(x):
    (rows, n), out = x.shape, torch.empty_like(x)
    kernels.distributed[(BLOCKS, rows), BLOCK](x, out, n)
    return out


def kept(x):
    (rows, n), out = x.shape, torch.empty_like(x)
    shared = -(-n // (4 * BLOCKS)) * 16
    kernels.kept[(BLOCKS, rows), BLOCK, shared](x, out, n)
    return out


def library(x):
    return torch.nn.functional.rms_norm(x, x.shape[1:], eps=EPS)


def summed(rows, n):
    """Return the cost of a kernel that reads x and sums its squares."""
    return Cost(read=4 * rows * n, ops={"fp32": 2 * rows * n}, launches=1)


def divided(rows, n, ops=1, l2=8):
    """Return the cost of a kernel that reads x from DRAM once and writes it."""
    elements = rows * n
    return Cost(
        read=4 * elements,
        write=4 * elements,
        l2=l2 * elements,
        ops={"fp32": ops * elements},
        launches=1,
    )


@compare(
    baseline=atomics,
    optimized=[
        Variant(two_passes, at_least="neutral"),
        Variant(
            distributed,
            needs=("clusters", "dsmem"),
            sass="UCGABAR_WAIT",
            at_least={"sm90": 1.1},
        ),
        Variant(
            kept,
            needs=("clusters", "dsmem"),
            sass=("UCGABAR_WAIT", "STS.128"),
            at_least={"sm90": 1.2},
        ),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 2048, "n": 65536}],
    # Rows begin at multiples of 16 bytes. With these sizes, some blocks or threads have no
    # elements.
    check_sizes=[
        {"rows": 3, "n": 20},
        {"rows": 5, "n": 1028},
        {"rows": 3, "n": 33004},
        {"rows": st.integers(3, 9), "n": st.integers(1, 3000).map(lambda vectors: 4 * vectors)},
    ],
    work=lambda rows, n: Work(
        read=4 * rows * n,
        write=4 * rows * n,
        flops={"fp32": 3 * rows * n},
        terms=n,
        roundings=3,
    ),
    bound="dram",
    costs={
        atomics: lambda rows, n: Cost(launches=1) + summed(rows, n) + divided(rows, n),
        two_passes: lambda rows, n: summed(rows, n) + divided(rows, n),
        distributed: lambda rows, n: divided(rows, n, ops=3, l2=12),
        kept: lambda rows, n: divided(rows, n, ops=3),
        library: lambda rows, n: replace(summed(rows, n), launches=0) + divided(rows, n),
    },
)
def test_cluster_reduction(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
