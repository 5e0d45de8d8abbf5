"""Shuffle reduction: lanes of a warp pass values to each other without shared memory or barriers.

Problem    Sum each row of an int32 matrix of 1 GiB. The rows are short: 256 or 1024 elements.
Baseline   shared_tree: a block of 256 threads has one row. The block reduces the 256 sums of its
           threads in a tree in shared memory, in 8 rounds with a barrier after each.
Optimized  shuffle: changes `shared_tree`. Each warp adds up its 32 sums with five shuffles. One
           barrier remains. After it, the first warp adds up the sums of the 8 warps.
           redux: changes `shuffle`. One `__reduce_add_sync` replaces the five shuffles. This
           intrinsic works only for integers.
           warp_per_row: changes `redux`. Each warp has its own row, so the kernel needs neither
           shared memory nor a barrier. A lane also loads eight times as many elements, several of
           them at once. So part of the gain comes from more loads in flight, and part from fewer
           instructions per element.
           library: `torch.sum`.
Bound      DRAM limits `warp_per_row`: every element is read once. On rows of 256 elements,
           instruction issue limits the other kernels: a thread loads one element, but issues dozens
           of instructions to find it and to add up the block. These instructions alone take longer
           than the transfers from DRAM. Starting one block per row also takes longer than the
           transfers, and longer than the instructions of `redux`. After its loads, a block also
           spends time without any load in flight. In rows of 1024, a thread adds up four elements
           with few additional instructions, so these limits matter less.
Seen       `shared_tree`, `shuffle` and `redux`, which have a block per row, take longer at n = 256
           than predicted from their instructions and block starts. At n = 1024, `shared_tree` and
           `shuffle` do. A block occupies its SM during its start, then during its wait for DRAM,
           then during its additions, and an SM has room for 8 blocks. At n = 256, a block of redux
           occupies its SM for 0.86 us, and a block of `shared_tree` for 1.25 us. A block of
           `../ch07/vector_width_test.py` that copies 256 elements takes 0.8 us. So a block spends
           most of its time on its start and its wait for DRAM. We did not measure start and wait
           separately. We did not examine the library's kernel. CUB's DeviceSegmentedReduce is
           slower than `warp_per_row` at both sizes (benchmarks/cub_test.py).
Use when   A block needs a sum or a maximum: reduce inside warps first. If rows are short, give a
           row to a warp. If a kernel reduces once after long loops, it hardly matters how the block
           adds up its sums (`../ch07/reduction_test.py`).
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("shuffle_reduction.cu")
BLOCK, WARPS = 256, 8
LIMIT = 1000  # largest absolute value of an element, so that no sum overflows


def inputs(device, rows, n):
    return (torch.randint(-LIMIT, LIMIT + 1, (rows, n), device=device, dtype=torch.int32),)


def reference(x):
    return x.long().sum(dim=1)


def block_per_row(kernel, x):
    rows, n = x.shape
    out = torch.empty(rows, device=x.device, dtype=torch.int32)
    kernel[rows, BLOCK](x, out, n)
    return out


def shared_tree(x):
    return block_per_row(kernels.shared_tree, x)


def shuffle(x):
    return block_per_row(kernels.shuffle, x)


def redux(x):
    return block_per_row(kernels.redux, x)


def warp_per_row(x):
    rows, n = x.shape
    out = torch.empty(rows, device=x.device, dtype=torch.int32)
    kernels.warp_per_row[-(-rows // WARPS), BLOCK](x, out, rows, n)
    return out


def library(x):
    return torch.sum(x, dim=1, dtype=torch.int32)


# Instructions that the warps of a row issue, counted in the machine code for sm_90, by n.
ISSUED = {
    shared_tree: {256: 824, 1024: 1008},
    shuffle: {256: 606, 1024: 790},
    redux: {256: 513, 1024: 697},
    warp_per_row: {256: 113, 1024: 281},
}


def summed(rows, n, side=None, shared=0, blocks=0):
    """Return the cost of `side`, which moves `shared` bytes in shared memory per row."""
    # An instruction of a warp takes the slots of 32 multiply-adds. Sizes that are checked but not
    # timed have other n, and count no instructions.
    ops = {"fp32": 2 * 32 * ISSUED[side].get(n, 0) * rows} if side else {}
    return Cost(
        read=4 * rows * n,
        write=4 * rows,
        shared=shared * rows,
        ops=ops,
        blocks=blocks,
        launches=1,
    )


def in_tree(rows, n):
    # 256 sums are stored. Each of 255 additions loads two sums and stores one.
    return summed(rows, n, shared_tree, shared=4 * (BLOCK + 3 * (BLOCK - 1)), blocks=rows)


def in_warps(side):
    return lambda rows, n: summed(rows, n, side, shared=4 * 2 * WARPS, blocks=rows)


@compare(
    baseline=shared_tree,
    optimized=[
        Variant(shuffle, sass="SHFL", at_least={"sm90": 1.1}),
        Variant(redux, sass="REDUX", at_least={"sm90": 1.2}),
        Variant(warp_per_row, sass="REDUX", at_least={"sm90": 1.35}),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 2**20, "n": 256}, {"rows": 2**18, "n": 1024}],
    check_sizes=[
        {"rows": 9, "n": 255},
        {"rows": 13, "n": 1025},
        {"rows": st.integers(1, 17), "n": st.integers(1, 600)},
    ],
    work=lambda rows, n: Work(read=4 * rows * n, write=4 * rows),
    bound="dram",
    costs={
        shared_tree: in_tree,
        shuffle: in_warps(shuffle),
        redux: in_warps(redux),
        warp_per_row: lambda rows, n: summed(rows, n, warp_per_row, blocks=-(-rows // WARPS)),
        library: summed,
    },
)
def test_shuffle_reduction(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
