"""Softmax of long rows: compute the maximum and the sum in one pass instead of two.

Problem    Compute the softmax of each row of a (rows, n) fp32 matrix. A row does not fit in the
           registers of a block, and the rows that are processed at the same time do not fit in the
           L2.
Baseline   three_passes: one pass finds the row's maximum, one adds up the sum, and one writes. The
           passes read 12 bytes per element and write 4. Each program handles a row. Textbooks call
           this method safe softmax.
Optimized  online: one pass computes the maximum and the sum. When the maximum grows, the previous
           sum is scaled down (Milakov and Gimelshein, arXiv:1805.02867). `online` reads 8 bytes per
           element instead of 12, and computes three exponentials instead of two. Both sides compute
           an element's exponential for the sum, and again for the result.
           kept: changes `online`. A cluster of blocks keeps the row in registers and shared memory,
           so the row is read once, and each element needs one exponential. `kept` runs the CUDA C++
           kernel `clustered` of suites/ch09/softmax, because Triton cannot exchange data within a
           cluster.
           library: `torch.softmax`, which also reads each row three times.
Bound      DRAM: each pass reads the row again. The exponentials take less time than the reads.
Use when   A row fits neither in the registers of a block nor in the shared memory of a cluster. If
           a row fits, keep it there, so that it is read only once. suites/ch10/cluster_reduction
           keeps rows of this length in a cluster, for an RMS norm.
"""

import torch
import triton
import triton.language as tl
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("../ch09/softmax.cu")
BLOCK = 4096
WARPS = 8
SHARERS, THREADS = 4, 256  # blocks per cluster, which share a row; threads per block
HELD = 8 * 16 * THREADS  # bytes of a row that a block keeps in registers


@triton.jit
def three_passes_kernel(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n
    lanes = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, n, BLOCK):
        at = start + lanes
        most = tl.maximum(most, tl.load(x + row + at, mask=at < n, other=float("-inf")))
    largest = tl.max(most)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        at = start + lanes
        total += tl.exp(tl.load(x + row + at, mask=at < n, other=float("-inf")) - largest)
    scale = 1 / tl.sum(total)
    for start in range(0, n, BLOCK):
        at = start + lanes
        value = tl.load(x + row + at, mask=at < n)
        tl.store(out + row + at, tl.exp(value - largest) * scale, mask=at < n)


@triton.jit
def online_kernel(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n
    lanes = tl.arange(0, BLOCK)
    # Begin with the lowest finite number: with -inf, a lane without elements would compute -inf -
    # -inf.
    most = tl.full((BLOCK,), -3.4028234e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        at = start + lanes
        value = tl.load(x + row + at, mask=at < n, other=float("-inf"))
        larger = tl.maximum(most, value)
        total = total * tl.exp(most - larger) + tl.exp(value - larger)
        most = larger
    largest = tl.max(most)
    scale = 1 / tl.sum(total * tl.exp(most - largest))
    for start in range(0, n, BLOCK):
        at = start + lanes
        value = tl.load(x + row + at, mask=at < n)
        tl.store(out + row + at, tl.exp(value - largest) * scale, mask=at < n)


def inputs(device, rows, n):
    return (torch.randn(rows, n, device=device),)


def reference(x):
    return x.double().softmax(dim=1)


def launch(kernel, x):
    out = torch.empty_like(x)
    kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=BLOCK, num_warps=WARPS)
    return out


def three_passes(x):
    return launch(three_passes_kernel, x)


def online(x):
    return launch(online_kernel, x)


def kept(x):
    (rows, n), out = x.shape, torch.empty_like(x)
    shared = max(16 * triton.cdiv(n, 4 * SHARERS) - HELD, 0)
    launch = kernels.clustered.launch((SHARERS, rows), THREADS, shared, cluster=(SHARERS, 1))
    launch(x, out, n)
    return out


def library(x):
    return torch.softmax(x, dim=1)


def moved(rows, n, reads, exponentials):
    elements = rows * n
    return Cost(
        read=4 * reads * elements,
        write=4 * elements,
        sfu=exponentials * elements,
        ops={"fp32": 4 * elements},
        launches=1,
    )


@compare(
    baseline=three_passes,
    optimized=[
        online,
        Variant(kept, needs=("clusters", "dsmem"), sass="UCGABAR_WAIT"),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 2048, "n": 65536}],
    # kept needs rows that begin at multiples of 16 bytes.
    check_sizes=[
        {"rows": 3, "n": 1020},
        {"rows": 2, "n": 9004},
        {"rows": 2, "n": 40004},
        {"rows": st.integers(1, 4), "n": st.integers(9, 2250).map(lambda vectors: 4 * vectors)},
    ],
    work=lambda rows, n: Work(
        read=4 * rows * n, write=4 * rows * n, flops={"fp32": 4 * rows * n}, terms=n, roundings=3
    ),
    bound="dram",
    costs={
        three_passes: lambda rows, n: moved(rows, n, reads=3, exponentials=2),
        online: lambda rows, n: moved(rows, n, reads=2, exponentials=3),
        kept: lambda rows, n: moved(rows, n, reads=1, exponentials=1),
        library: lambda rows, n: moved(rows, n, reads=3, exponentials=2),
    },
    at_least={"sm90": 1.1},
)
def test_online_softmax(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
