"""Block size: how many threads an SM holds, and how often a block starts.

Problem    a * x + y on n fp32 elements, one thread per element. The kernel is the same on both
           sides. The size names the number of threads per block.
Baseline   usual: blocks of 256 threads.
Optimized  resized: of usual. Blocks of the size's number of threads. The cases are points of a
           curve, so they claim no speedup.
Bound      DRAM. An SM of an H200 or B200 holds at most 2048 threads and 32 blocks. With 32 threads
           per block, that is 1024 threads with two loads each: 8 KiB in flight, and DRAM at full
           rate needs about 13 KiB (`../ch07/vector_width_test.py`). From 64 to 1024 threads, the SM
           is full. An SM with room for 1536 threads, such as a GB10's, holds only one block of
           1024. Small blocks start more often, and each start takes time. A large block frees its
           place only when its last warp has ended, so part of the SM stays empty until then.
Use when   You choose a block size: start with 128 to 256 threads, and measure half and twice as
           many. If a kernel needs many registers or much shared memory, fewer threads fit an SM.
           Then the size of a block also decides how much of the SM stays unused.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Sweep, Work, compare, cuda_module

kernels = cuda_module("block_size.cu")
A = 0.75
USUAL = 256


def inputs(device, n, block):
    return torch.randn(n, device=device), torch.randn(n, device=device), block


def reference(x, y, block):
    return A * x.double() + y.double()


def launch(x, y, block):
    out = torch.empty_like(x)
    kernels.axpy[-(-x.numel() // block), block](A, x, y, out, x.numel())
    return out


def usual(x, y, block):
    return launch(x, y, USUAL)


def resized(x, y, block):
    return launch(x, y, block)


def added(n, block):
    return Cost(read=8 * n, write=4 * n, ops={"fp32": 2 * n}, launches=1)


@compare(
    baseline=usual,
    optimized=[resized],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**27, "block": block} for block in (32, 64, 128, 512, 1024)],
    check_sizes=[
        {"n": 1023, "block": 32},
        {"n": 2049, "block": 1024},
        {"n": st.integers(1, 3000), "block": st.sampled_from([32, 64, 128, 512, 1024])},
    ],
    work=lambda n, block: Work(read=8 * n, write=4 * n, flops={"fp32": 2 * n}, terms=2),
    bound="dram",
    costs={usual: added, resized: added},
    at_least="yardstick",
    sweep=Sweep("block"),
)
def test_block_size(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
