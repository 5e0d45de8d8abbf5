"""Block-aggregated atomics: add up in the block, because an address takes one atomic at a time.

Problem    Compute the dot product of two vectors of n fp32 elements.
Baseline   per_thread: the grid has as many blocks as fit on the GPU at once. The threads loop over
           the vectors, and each thread keeps its own sum. At the end, each thread adds its sum to
           the result with an atomic.
Optimized  per_warp: changes `per_thread`. The lanes of a warp add up their sums with shuffles, and
           one lane does the atomic.
           per_block: changes `per_warp`. The warps of a block also add up their sums, in shared
           memory, and one thread does the atomic.
           library: `torch.dot`, which is cuBLAS.
Bound      DRAM: both vectors are read once. All atomics go to one address, so the L2 does them one
           after another. The threads finish at about the same time, so all atomics come at the end
           of the kernel. The machine code of `per_thread` has one RED per thread: the compiler does
           not combine fp32 atomics, because the order of additions changes an fp32 sum. The cost
           assumes that an atomic on one address takes as long as in `../ch07/histogram_test.py`,
           where integers are added.
Seen       `per_thread` takes longer than predicted. If all sides sum as fast as `per_block`, an
           atomic takes 1.7 ns in `per_thread`, where every lane of a warp does one, and 1.2 ns in
           `per_warp`, where one lane does. An integer atomic in `../ch07/histogram_test.py` takes 1
           ns. We do not know why atomics take longer when all 32 lanes do one.
Use when   Many threads update one fp32 sum. For an int32 sum on one address, the compiler combines
           the atomics of a warp itself (REDUX in the machine code). For bitwise reproducible
           results, store the blocks' sums instead (`../ch07/reduction_test.py`).
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("block_atomics.cu")
BLOCK, WARP = 256, 32
EACH = 4  # elements that a thread loads at once
THREADS = 2048 * 132  # on an H200 at once
# Additions to a single address are slower than the `atomics` rate, which was measured with many
# addresses. They take this many times as long.
ADDRESSES = 850


def inputs(device, n):
    return torch.randn(n, device=device), torch.randn(n, device=device)


def reference(x, y):
    return (x.double() * y.double()).sum()


def launch(kernel, x, y):
    gpu = torch.cuda.get_device_properties(x.device)
    resident = gpu.max_threads_per_multi_processor // BLOCK * gpu.multi_processor_count
    out = torch.zeros((), device=x.device)
    # If n is small, launch fewer blocks, so that each thread still has several elements.
    kernel[min(resident, -(-x.numel() // (EACH * BLOCK))), BLOCK](x, y, out, x.numel())
    return out


def per_thread(x, y):
    return launch(kernels.per_thread, x, y)


def per_warp(x, y):
    return launch(kernels.per_warp, x, y)


def per_block(x, y):
    return launch(kernels.per_block, x, y)


def library(x, y):
    return torch.dot(x, y)


def summed(n):
    return Cost(read=8 * n, write=4, ops={"fp32": 2 * n}, launches=1)


def cleared_and_summed(n, each):
    """Return the cost of filling the result with zeros, and of a sum in which one of every `each`
    threads does an atomic."""
    return Cost(launches=1) + summed(n) + Cost(atomics=ADDRESSES * THREADS / each)


@compare(
    baseline=per_thread,
    optimized=[
        Variant(per_warp, sass="SHFL", at_least={"sm90": 4.0}),
        Variant(per_block, sass="SHFL", at_least={"sm90": 4.3}),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**26}],
    check_sizes=[{"n": 1023}, {"n": 9001}, {"n": st.integers(33, 5000)}],
    work=lambda n: Work(read=8 * n, write=4, flops={"fp32": 2 * n}, terms=n),
    bound="dram",
    costs={
        per_thread: lambda n: cleared_and_summed(n, each=1),
        per_warp: lambda n: cleared_and_summed(n, each=WARP),
        per_block: lambda n: cleared_and_summed(n, each=BLOCK),
        library: lambda n: summed(n) + Cost(launches=1),  # cuBLAS adds up the blocks' sums
    },
)
def test_block_atomics(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
