"""RMS norm: one pass over the data instead of eight kernels, for rows of 256 to 262144.

Problem    Compute x / sqrt(mean(x^2) + eps) * weight in fp32 for each row of fp16 matrices with
           2^28 elements. The rows have 256 to 262144 elements.
Baseline   chain: the norm as in typical model code, which converts to fp32, squares, takes the
           mean, adds eps, takes the root, multiplies, converts to fp16, and multiplies by the
           weight. Six of the eight kernels make a pass over the matrix. The other two process one
           number per row.
Optimized  compiled: changes `chain`. `torch.compile` compiles the same formula.
           fused: changes `chain`. One Triton kernel keeps the row in registers. A program processes
           several short rows at once. This kernel runs for rows of up to 32768 elements.
           walked: changes `chain`. One Triton kernel makes two passes over the row in steps of
           4096: one for the sum of squares and one for the results. This kernel runs for rows of
           4096 or more elements.
           clustered: changes `fused`. In CUDA C++, the blocks of a cluster share a row and keep it
           in their shared memory. Each block sums its own squares and reads the sums of the other
           blocks. This kernel runs for rows of 32768 or more elements, in multiples of 8 elements
           (16 bytes). An SM of an H200 holds three blocks, each with 64 KiB of a row. A row of
           32768 elements has a single block, with fewer threads than a program of `fused`.
           ring: changes `clustered`. The clusters are persistent: each processes many rows. While
           one row is in registers, bulk copies load the next rows into a ring buffer of three rows
           in shared memory. So only one block fits on an SM. A block has 512 threads instead of
           256, and loads its part of the weight only once. This kernel runs for rows of more than
           32768 and up to 262144 elements.
           pushed: changes `ring`. Each block sends its sum to the shared memory of the other blocks
           with st.async, and an mbarrier there counts the bytes. In `ring`, a block uses ordinary
           stores, and then all blocks wait at the cluster's barrier.
           library: `torch.nn.functional.rms_norm`.
Bound      DRAM. `fused` and the kernels in CUDA C++ read and write each element once, 4 bytes in
           total. The chain also reads and writes fp32 copies. `walked` reads a row twice. If the
           rows of all running programs fit in the L2 together, only the first read comes from DRAM.
           Rows of up to 16384 elements fit. torch's kernel has a block of 128 threads for each row.
           With rows of 256 elements, starting a million blocks takes longer than the memory
           traffic. The costs do not include the time that blocks wait for each other. In
           `clustered`, a block moves no data while it waits for the sums, and only the other blocks
           of its SM keep DRAM busy. In `ring`, the copies of the next rows continue. But before a
           thread arrives at the cluster's barrier, its earlier stores have to become visible to the
           cluster. In the machine code for sm_90, the thread waits at a MEMBAR.ALL.GPU until its
           stores of the previous row are done. An st.async does not wait for earlier stores.
Seen       On an H100, `chain` takes a quarter longer than its memory traffic alone. We did not time
           the kernels of `chain` one by one. With rows of 32768, `compiled` takes as long as
           `fused`, and less time than two reads from DRAM would take. So Inductor's code reads
           these rows from DRAM only once, as its cost assumes. Inductor's code probably processes
           fewer rows at a time than `walked`, so that its rows fit in the L2. `library` takes
           longer than its memory traffic at all lengths, and is the slowest of the fused sides. We
           did not examine its kernel. On an H100, `clustered` takes an eighth longer than its
           memory traffic with rows of 32768, and a sixth longer with 262144. With rows of 262144,
           `pushed` takes as long as `clustered`, and `ring` takes a quarter longer than its memory
           traffic. On an H200, `chain` takes over 40 % longer than its memory traffic. With rows of
           262144, `clustered` takes almost 33 % longer than its memory traffic, `ring` 60 % longer,
           and `pushed` 20 % longer. So `pushed` is the fastest. An H200 has faster DRAM and the
           same SMs, so the waits of the blocks are a larger part of the time. A standalone program
           with the same loops as `pushed` reached more than 90 % of the copy rate on an H200. We do
           not know why the page reaches less.
Use when   Always fuse a norm. For rows of up to 32768 elements, compiled code is as fast as a
           hand-written kernel, and torch's own kernel takes longer. Write your own kernel if it
           does more than the norm, as in dropout_norm_test.py. Keep a row in registers if it fits.
           If not, keep it in the shared memory of a cluster. If the blocks of a cluster exchange a
           few numbers in every iteration of a loop, send them with st.async.
           `../ch10/cluster_reduction_test.py` compares ways to share sums between blocks. The
           backward pass is in norm_backward_test.py.
"""

import functools
from dataclasses import replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pytest_aisp import Cost, Sweep, Variant, Work, compare, cuda_module

kernels = cuda_module("rms_norm.cu")

TOTAL = 2**28  # elements of a matrix
EPS = 1e-5
STEP = 4096
LONGEST = 32768  # elements of a row that fused keeps in registers
LENGTHS = (256, 4096, 32768, 262144)
RUNNING = 132 * 8  # programs of walked that run on an H200: 32 registers per thread
L2 = 60 * 2**20
BLOCK, MOST_BLOCKS = 256, 8  # clustered: threads per block, maximum blocks per cluster
SLICE = 64 * 2**10  # bytes of a row that a block keeps; more if 8 blocks are not enough
THREADS, STAGES = 512, 3  # ring and pushed: threads per block, and rows in a block's ring buffer


@triton.jit
def fused_kernel(x, weight, out, rows, n, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, BLOCK)
    at = row[:, None] * n + lanes[None, :]
    inside = (row[:, None] < rows) & (lanes[None, :] < n)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value, axis=1) / n + eps)
    scaled = value * scale[:, None] * tl.load(weight + lanes, mask=lanes < n)[None, :]
    tl.store(out + at, scaled.to(tl.float16), mask=inside)


@triton.jit
def walked_kernel(x, weight, out, n, eps, STEP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n
    lanes = tl.arange(0, STEP)
    squares = tl.zeros((STEP,), tl.float32)
    for start in range(0, n, STEP):
        at = start + lanes
        value = tl.load(x + row + at, mask=at < n, other=0.0).to(tl.float32)
        squares += value * value
    scale = 1 / tl.sqrt(tl.sum(squares) / n + eps)
    for start in range(0, n, STEP):
        at = start + lanes
        value = tl.load(x + row + at, mask=at < n).to(tl.float32)
        scaled = value * scale * tl.load(weight + at, mask=at < n)
        tl.store(out + row + at, scaled.to(tl.float16), mask=at < n)


def inputs(device, rows, n):
    x = torch.randn(rows, n, device=device, dtype=torch.float16)
    return x, torch.randn(n, device=device, dtype=torch.float16)


def reference(x, weight):
    x = x.double()
    return x * torch.rsqrt((x * x).mean(dim=1, keepdim=True) + EPS) * weight.double()


def formula(x, weight):
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(dim=1, keepdim=True) + EPS)
    return (wide * scale).to(x.dtype) * weight


def chain(x, weight):
    return formula(x, weight)


@functools.cache
def compiled_formula():
    return torch.compile(formula, dynamic=False)


def compiled(x, weight):
    return compiled_formula()(x, weight)


def fused(x, weight):
    rows, n = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(n)
    at_once = max(STEP // block, 1)
    warps = min(max(at_once * block // 1024, 4), 32)
    grid = (triton.cdiv(rows, at_once),)
    fused_kernel[grid](x, weight, out, rows, n, EPS, ROWS=at_once, BLOCK=block, num_warps=warps)
    return out


def walked(x, weight):
    out = torch.empty_like(x)
    walked_kernel[(len(x),)](x, weight, out, x.shape[1], EPS, STEP=STEP, num_warps=8)
    return out


def blocks_of(n):
    """Return how many blocks share a row of n elements."""
    return min(triton.next_power_of_2(triton.cdiv(2 * n, SLICE)), MOST_BLOCKS)


def clustered(x, weight):
    (rows, n), out = x.shape, torch.empty_like(x)
    if n % 8:
        raise ValueError(f"rows of {n} elements; clustered needs a multiple of 8")
    blocks = blocks_of(n)
    shared = 16 * triton.cdiv(n, 8 * blocks)
    launch = kernels.clustered.launch((blocks, rows), BLOCK, shared, cluster=(blocks, 1))
    launch(x, weight, out, n, EPS)
    return out


def staying(kernel, x, weight):
    """Run a kernel with as many clusters as fit on the GPU, but at most one for every 8 rows."""
    (rows, n), out = x.shape, torch.empty_like(x)
    if n % 8 or 2 * n > MOST_BLOCKS * SLICE:
        raise ValueError(f"rows of {n} elements; needs a multiple of 8, and at most 262144")
    blocks, shared = blocks_of(n), STAGES * SLICE
    fit = kernel.clusters_at_once(THREADS, shared, cluster=(blocks, 1)) if x.is_cuda else 2
    clusters = min(fit, triton.cdiv(rows, 8))
    launch = kernel.launch((blocks, clusters), THREADS, shared, cluster=(blocks, 1))
    launch(x, weight, out, n, rows, EPS)
    return out


def ring(x, weight):
    return staying(kernels.ring, x, weight)


def pushed(x, weight):
    return staying(kernels.pushed, x, weight)


def library(x, weight):
    return F.rms_norm(x, x.shape[1:], weight, EPS)


def per_element(rows, n, read, write):
    """Return the cost of one of torch's kernels that moves these bytes per element."""
    return Cost(read=read * rows * n, write=write * rows * n, launches=1)


def per_row(rows):
    return Cost(read=4 * rows, write=4 * rows, launches=1)


def chain_cost(rows, n):
    return (
        per_element(rows, n, read=2, write=4)  # to fp32
        + per_element(rows, n, read=4, write=4)  # squares
        + per_element(rows, n, read=4, write=4 / n)  # mean
        + 2 * per_row(rows)  # eps, root
        + per_element(rows, n, read=4, write=4)  # times the root
        + per_element(rows, n, read=4, write=2)  # to fp16
        + per_element(rows, n, read=2, write=2)  # times the weight
    )


def one_kernel(rows, n, reads=1):
    return Cost(read=2 * reads * rows * n + 2 * n, write=2 * rows * n, sfu=2 * rows, launches=1)


def walked_cost(rows, n):
    in_work = 2 * n * min(rows, RUNNING)
    return one_kernel(rows, n, reads=1 if in_work < L2 else 2)


def compiled_cost(rows, n):
    return one_kernel(rows, n) if n <= LONGEST else walked_cost(rows, n)


def library_cost(rows, n):
    return replace(walked_cost(rows, n), blocks=rows)


@compare(
    baseline=chain,
    optimized=[
        Variant(compiled, at_least={"sm90": 5.9}),
        Variant(fused, when=lambda rows, n: n <= LONGEST, at_least={"sm90": 9.3}),
        Variant(walked, when=lambda rows, n: n >= STEP, at_least={"sm90": 5.9}),
        Variant(
            clustered,
            when=lambda rows, n: n >= LONGEST,
            needs=("clusters", "dsmem"),
            sass=("UCGABAR_WAIT", "LDGSTS.E.BYPASS.128"),
        ),
        Variant(
            ring,
            when=lambda rows, n: n > LONGEST,
            needs=("clusters", "dsmem", "bulk_copy", "shared_227k"),
            sass=("UCGABAR_WAIT", "UBLKCP"),
        ),
        Variant(
            pushed,
            when=lambda rows, n: n > LONGEST,
            needs=("clusters", "dsmem", "bulk_copy", "st_async", "shared_227k"),
            sass=("UBLKCP", "STAS"),
        ),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": TOTAL // n, "n": n} for n in LENGTHS],
    # Rows begin at multiples of 16 bytes. With 40008 elements, a cluster has at least two blocks.
    # The blocks of a cluster have different numbers of vectors, and so do some of the threads. A
    # cluster of ring gets more of the 9 rows than its shared memory can hold.
    check_sizes=[
        {"rows": 17, "n": 248},
        {"rows": 2, "n": 9000},
        {"rows": 9, "n": 40008},
    ],
    work=lambda rows, n: Work(read=2 * rows * n + 2 * n, write=2 * rows * n, terms=n, roundings=2),
    bound="dram",
    costs={
        chain: chain_cost,
        **dict.fromkeys([fused, clustered, ring, pushed], one_kernel),
        compiled: compiled_cost,
        walked: walked_cost,
        library: library_cost,
    },
    sweep=Sweep("n"),
)
def test_rms_norm(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
