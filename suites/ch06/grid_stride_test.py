"""Grid-stride loop: start fewer blocks, so that each prepares its data only once.

Problem    test_grid_stride decodes n int32 codes from 0 to 255 by a table of 256 fp32 values.
           test_without_table multiplies n fp32 elements by a number.
Baseline   decode_each: one thread per element, in blocks of 256. Each block first copies the table
           into its shared memory, for only 256 look-ups.
           scale_each: one thread per element, in blocks of 256.
Optimized  decode_stride: changes `decode_each`. The grid has as many blocks as fit on the GPU at
           once, and each block copies the table once. Then the threads loop over the codes with a
           stride of the whole grid.
           decode_code_first: changes `decode_each`. A thread loads its code before it waits for the
           table, so that both loads are in flight at the same time.
           decode_through_l1: changes `decode_each`. Threads read the table from global memory, and
           the L1 caches it.
           library: `torch.index_select`.
           scale_stride: changes `scale_each`. The grid has as many blocks as fit on the GPU at
           once, and they loop over the elements.
Bound      DRAM, 4 bytes read and 4 written per element. The table is small and every block of an SM
           reads it, so it comes from the L1 or the L2 and costs almost no DRAM traffic. But the
           table costs time: `decode_each` first waits for it, and then for the codes. All kernels
           have one code or element per thread in flight, which is not enough for the full rate of
           DRAM (`../ch07/vector_width_test.py`). The kernels without a loop start a block for every
           256 elements, and these starts alone take longer than the transfers from and to DRAM.
Seen       `decode_stride` and `scale_stride` take about the same time, so copying a table once
           costs almost nothing. The 8 KiB in flight per SM predict both times within an eighth. The
           kernels without a loop (`decode_each`, `decode_code_first`, `decode_through_l1` and
           `scale_each`) also have 8 KiB in flight, but each block starts, then waits for DRAM, then
           ends. We did not measure how long each phase takes. `decode_code_first` gains almost
           nothing, so the wait for the table is short. We did not examine the library's kernel.
Use when   Each block first loads a table, sets up a random generator, or clears counters. Without
           such work, the loop saves only block starts, and gains less. Also use a grid-stride loop
           when n may exceed the largest grid, or when the grid must stay the same for any n. To
           reach the full copy rate, unroll the loop (`ilp_test.py`).
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("grid_stride.cu")
A = 0.75
BLOCK = ENTRIES = 256
CONFLICTS = 3.2  # different entries in the busiest bank for 32 random codes, mean over warps
IN_FLIGHT = 4 * 2048  # bytes per SM, which runs 2048 threads with one load each
COPY = 2 * 4 * ENTRIES / BLOCK  # bytes per element that a block loads and stores to copy the table


def blocks_for(x):
    return -(-x.numel() // BLOCK)


def blocks_at_once(x):
    """Return the number of blocks that the GPU runs at once.

    If `x` is small, return fewer blocks, so that a thread always has two elements or more.
    """
    gpu = torch.cuda.get_device_properties(x.device)
    resident = gpu.max_threads_per_multi_processor // BLOCK * gpu.multi_processor_count
    return min(resident, -(-blocks_for(x) // 2))


def codes_and_table(device, n):
    codes = torch.randint(0, ENTRIES, (n,), device=device, dtype=torch.int32)
    return torch.randn(ENTRIES, device=device), codes


def decoded(table, codes):
    return table.double()[codes.long()]


def decode(kernel, table, codes, blocks):
    out = torch.empty(codes.shape, device=codes.device)
    kernel[blocks, BLOCK](table, codes, out, codes.numel())
    return out


def decode_each(table, codes):
    return decode(kernels.decode_each, table, codes, blocks_for(codes))


def decode_code_first(table, codes):
    return decode(kernels.decode_code_first, table, codes, blocks_for(codes))


def decode_stride(table, codes):
    return decode(kernels.decode_stride, table, codes, blocks_at_once(codes))


def decode_through_l1(table, codes):
    return decode(kernels.decode_through_l1, table, codes, blocks_for(codes))


def library(table, codes):
    return torch.index_select(table, 0, codes)


def elements(device, n):
    return (torch.randn(n, device=device),)


def scaled(x):
    return A * x.double()


def scale(kernel, x, blocks):
    out = torch.empty_like(x)
    kernel[blocks, BLOCK](A, x, out, x.numel())
    return out


def scale_each(x):
    return scale(kernels.scale_each, x, blocks_for(x))


def scale_stride(x):
    return scale(kernels.scale_stride, x, blocks_at_once(x))


def looked_up(n, blocks=0, copy=0, in_flight=IN_FLIGHT):
    """Return the cost if a block moves `copy` bytes per element before its look-ups.

    Reads of the table through the L1 also count as `shared`, because the L1 and shared memory are
    one unit. `blocks` is 0 for a loop, which has too few blocks to matter, and for the library,
    whose number of blocks is unknown.
    """
    read, shared = 4 * n + 4 * ENTRIES, (copy + 4 * CONFLICTS) * n
    return Cost(
        read=read, write=4 * n, in_flight=in_flight, shared=shared, blocks=blocks, launches=1
    )


def multiplied(n, blocks=0):
    return Cost(
        read=4 * n, write=4 * n, in_flight=IN_FLIGHT, ops={"fp32": n}, blocks=blocks, launches=1
    )


SIZES = [{"n": 2**27}]
CHECK_SIZES = [{"n": 1023}, {"n": st.integers(33, 5000)}]


@compare(
    baseline=decode_each,
    optimized=[
        Variant(decode_stride, at_least={"sm90": 1.1}),
        Variant(decode_code_first, at_least="neutral"),
        Variant(decode_through_l1, at_least="neutral"),
        Variant(library, at_least="yardstick"),
    ],
    inputs=codes_and_table,
    reference=decoded,
    sizes=SIZES,
    check_sizes=CHECK_SIZES,
    work=lambda n: Work(read=4 * n + 4 * ENTRIES, write=4 * n),
    bound="dram",
    costs={
        **dict.fromkeys(
            [decode_each, decode_code_first], lambda n: looked_up(n, -(-n // BLOCK), COPY)
        ),
        decode_through_l1: lambda n: looked_up(n, -(-n // BLOCK)),
        decode_stride: looked_up,
        library: lambda n: looked_up(n, in_flight=0),
    },
)
def test_grid_stride(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()


@compare(
    baseline=scale_each,
    optimized=[scale_stride],
    inputs=elements,
    reference=scaled,
    sizes=SIZES,
    check_sizes=CHECK_SIZES,
    work=lambda n: Work(read=4 * n, write=4 * n, flops={"fp32": n}),
    bound="dram",
    costs={scale_each: lambda n: multiplied(n, -(-n // BLOCK)), scale_stride: multiplied},
    at_least={"sm90": 1.05},
)
def test_without_table(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
