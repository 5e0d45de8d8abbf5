"""Row mapping: give longer rows more threads.

Problem    Compute the Euclidean norms of the rows of a row-major fp32 matrix of 1 GiB. The x-axis
           of the curve is the number n of elements per row. The size of the matrix is fixed, so a
           larger n means fewer rows.
Baseline   thread_per_row: one thread reads a whole row. Neighboring threads read elements that are
           n elements apart.
Optimized  warp_per_row: changes `thread_per_row`. The 32 lanes of a warp share a row, read
           neighboring elements, and add up their sums with shuffles.
           block_per_row: changes `warp_per_row`. The 256 threads of a block share a row. Adding up
           their sums also needs shared memory and a barrier.
           library: `torch.linalg.vector_norm`.
Bound      DRAM: every element is read once. All kernels have four loads per thread in flight.
           thread_per_row: a load of a warp touches 32 sectors and uses 4 bytes of each. The
           thread's next loads use the rest of a sector if it is still in the L1. The threads of a
           full SM use 2048 such sectors at a time, which is 64 KiB. These sectors fit in the L1, so
           each is read from DRAM only once. But the L1 must look up 32 lines for each load of a
           warp, while a load of the other sides needs only one line. The L1 looks up one line per
           cycle, so these lookups are the limit. With long rows, there are also too few threads:
           with fewer than 33792 rows, some SMs have no block.
           warp_per_row: with rows of 32 elements, the limits are the starts of blocks and
           instruction issue. A block reads only 1 KiB, and a warp issues dozens of instructions to
           find its elements and to add up the sums of its lanes.
           block_per_row: with rows of up to a few hundred elements, block starts and instruction
           issue are also the limits, because there are eight times as many blocks and instructions
           per row as in `warp_per_row`. With fewer than 1024 elements per row, a thread also has
           fewer than four loads.
Seen       With short rows, `warp_per_row` and `block_per_row` take longer than predicted. The
           likely reason is that the rate of block starts was measured with empty blocks. With the
           shortest rows, `library` takes longer than predicted from its bytes. We do not know how
           the library's kernel maps rows to threads.
Use when   You reduce along the contiguous dimension. Start with a warp per row. Try a block per row
           if there are fewer rows than warps on the GPU, and several blocks per row if there are
           fewer rows than SMs (`../ch07/reduction_test.py`). One thread per row is right for
           column-major matrices, where neighboring threads read neighboring elements. For row-major
           matrices, a thread per row is slower than a warp per row even if rows have only 32
           elements. `../ch06/shuffle_reduction_test.py` compares ways to add up the sums of a
           block's threads.
"""

from dataclasses import replace

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Sweep, Variant, Work, compare, cuda_module

kernels = cuda_module("row_mapping.cu")
BLOCK, WARPS = 256, 8
SMS = 132  # of an H200, for costs
ELEMENTS = 2**28


def inputs(device, rows, n):
    return (torch.randn(rows, n, device=device),)


def reference(x):
    return x.double().square().sum(dim=1).sqrt()


def launch(kernel, x, rows_per_block):
    rows, n = x.shape
    out = torch.empty(rows, device=x.device)
    kernel[-(-rows // rows_per_block), BLOCK](x, out, rows, n)
    return out


def thread_per_row(x):
    return launch(kernels.thread_per_row, x, BLOCK)


def warp_per_row(x):
    return launch(kernels.warp_per_row, x, WARPS)


def block_per_row(x):
    return launch(kernels.block_per_row, x, 1)


def library(x):
    return torch.linalg.vector_norm(x, dim=1)


def reduced(warps, start, end=0):
    """Return the cost of a side with `warps` warps per row.

    The instructions of a warp are counted in the machine code for sm_90: `start` outside the loop
    (including the sum of the lanes), 27 per round of four loads, 9 for each remaining load, and
    `end` for the sum of a row's warps. An instruction takes the issue slots of 32 multiply-adds.
    """

    def read_once(rows, n):
        rounds, left = divmod(n, 4 * 32 * warps)
        issued = warps * (start + 27 * rounds) + 9 * -(-left // 32) + end
        return Cost(
            read=4 * rows * n,
            write=4 * rows,
            ops={"fp32": 64 * issued * rows},
            blocks=-(-rows * warps // WARPS),
            launches=1,
        )

    return read_once


def read_whole(rows, n):
    return Cost(read=4 * rows * n, write=4 * rows, ops={"fp32": 2 * rows * n}, launches=1)


def read_by_threads(rows, n):
    """Return the cost of a thread per row. The SM with the most blocks determines the time.

    Each element needs a lookup in the L1. A lookup takes one cycle, so it counts as 128 bytes of
    shared memory.
    """
    blocks = -(-rows // BLOCK)
    shared = 128 * BLOCK * n * SMS * -(-blocks // SMS)
    return replace(read_whole(rows, n), shared=shared)


@compare(
    baseline=thread_per_row,
    optimized=[
        Variant(warp_per_row, sass="SHFL", at_least={"sm90": 2.6}),
        # With only 8 KiB per row, the start and the barrier of a block may cancel the gain.
        Variant(block_per_row, sass="SHFL", at_least="yardstick"),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": ELEMENTS // n, "n": n} for n in (32, 256, 2048, 16384)],
    check_sizes=[
        {"rows": 9, "n": 1025},
        {"rows": 301, "n": 33},
        {"rows": st.integers(1, 17), "n": st.integers(1, 400)},
    ],
    work=lambda rows, n: Work(
        read=4 * rows * n, write=4 * rows, flops={"fp32": 2 * rows * n}, terms=n
    ),
    bound="dram",
    costs={
        thread_per_row: read_by_threads,
        library: read_whole,
        warp_per_row: reduced(1, start=55),
        block_per_row: reduced(WARPS, start=50, end=40),
    },
    sweep=Sweep("n", judged=[2048]),
)
def test_row_mapping(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
