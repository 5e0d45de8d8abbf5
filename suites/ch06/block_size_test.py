"""Block size: it sets how many threads fit on an SM and how many blocks must start.

Problem    Compute a * x + y on n fp32 elements, one thread per element. Both sides run the same
           kernel. Each case of the page uses a different number of threads per block.
Baseline   usual: blocks of 256 threads.
Optimized  resized: changes `usual`. The case sets the number of threads per block. The cases are
           points of a curve, so the page claims no speedup.
Bound      Up to 128 threads, the limit is the start of blocks: the GPU starts a limited number of
           blocks per second, whether a block has one warp or four. With half the threads per block,
           there are twice as many blocks. An SM of an H200 or B200 holds 2048 threads and 32
           blocks, so blocks of 32 threads fill at most half of an SM. But this is not the limit: if
           a block takes 1 us, new blocks start so slowly that only about 13 of the 32 places are in
           use. From 256 threads on, the limit is DRAM. An SM with room for 1536 threads, as in a
           GB10, holds only one block of 1024. A large block frees its slot only when its last warp
           ends, so part of the SM is empty until then.
Seen       `usual`, and `resized` with 512 and 1024 threads, take longer than predicted from their
           bytes. The 2048 threads of an SM have 16 KiB of loads in flight. If a thread takes as
           long as in `../ch07/vector_width_test.py`, the copy rate needs about 17 KiB here, because
           two of three bytes are loads. Blocks of 512 and 1024 threads are slower than `usual`,
           although fewer of them start. The likely reason is that a large block holds its slot
           until its last warp ends, but we did not measure how much of an SM is empty.
Use when   You choose a block size: start with 128 to 256 threads, and measure half and twice as
           many. If a kernel needs many registers or much shared memory, fewer threads fit on an SM.
           In this case, the block size also decides how much of the SM stays unused.
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
    ops = {"fp32": 2 * n}
    return Cost(read=8 * n, write=4 * n, ops=ops, blocks=-(-n // block), launches=1)


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
    costs={usual: lambda n, block: added(n, USUAL), resized: added},
    at_least="yardstick",
    sweep=Sweep("block"),
)
def test_block_size(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
