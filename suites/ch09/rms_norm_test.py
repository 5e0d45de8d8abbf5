"""RMS norm: one pass over the data instead of eight kernels, over the length of a row.

Problem    x / sqrt(mean(x^2) + eps) * weight for each row of fp16 matrices with 2^28 elements,
           computed in fp32. The rows have 256 to 262144 elements.
Baseline   chain: the norm as model code has it: convert to fp32, square, mean, sum with eps, root,
           product, convert back, product with the weight. Six of the eight kernels pass over the
           matrix. The other two have one number per row.
Optimized  compiled: of chain, through `torch.compile`.
           fused: of chain. One Triton kernel keeps the row in registers. A program takes several
           short rows at once. It exists up to rows of 32768 elements.
           walked: of chain. One Triton kernel walks the row twice in steps of 4096, once for the
           sum of squares and once for the results. It exists from rows of 4096 on.
           clustered: of fused. In CUDA C++, the blocks of a cluster share a row and keep it in
           their shared memory. Each adds up its own squares and reads the sums of the others. It
           exists from rows of 32768 on, and needs a multiple of 8 elements (16 bytes). An SM of an
           H200 holds three blocks with 64 KiB of a row each. At 32768, a row has a single block,
           which is smaller than that of fused.
           ring: of clustered. The clusters stay and take row after row. While they have one in
           registers, bulk copies bring the next ones to shared memory, which is a ring of three
           rows. So only one block fits an SM. It has 512 threads instead of 256, and loads its part
           of the weight once. It exists for rows of more than 32768 elements, up to 262144.
           pushed: of ring. Each block pushes its sum to the shared memory of the others by
           st.async, and an mbarrier there counts the bytes. In ring it stores the sum too, but all
           meet at the cluster's barrier.
           library: `torch.nn.functional.rms_norm`.
Bound      DRAM. fused and the kernels in CUDA C++ read and write each element once, 4 bytes in
           all. The chain also reads and writes fp32 copies. walked reads a row twice. As long as
           the rows of all running programs fit the L2 together, only the first of its reads comes
           from DRAM. That is so up to rows of 16384 elements. torch's kernel has a block of 128
           threads for each row. With rows of 256 elements, the starts of a million blocks take
           longer than the bytes.
           The costs do not know that blocks wait for each other. In clustered, a block moves
           nothing while it waits for the sums, and the others of its SM have to make up for that.
           In ring, the copies of the next rows go on. But a thread that arrives at a cluster's
           barrier releases all that it has written: in the machine code for sm_90 it first waits at
           a MEMBAR.ALL.GPU, for its stores of the row before. An st.async waits for no store.
Seen       On an H100, chain takes a quarter longer than its bytes. We did not time its kernels
           alone. compiled with rows of 32768 takes less time than two reads from DRAM, and as long
           as fused. So Inductor's code reads these rows from DRAM only once, and its cost counts
           that. It probably has fewer rows at work at a time than walked, so that they fit the L2.
           library takes longer than its bytes at all lengths, and it is the slowest of the fused
           sides. We did not examine its kernel. On an H100, clustered takes an eighth longer than
           its bytes with rows of 32768, and a sixth longer with 262144. There pushed takes as long
           as clustered, and ring a quarter longer than its bytes. A standalone program with such
           loops ran on an H200. In it pushed was faster than clustered, and reached more than nine
           tenths of the copy rate with rows of 65536 to 262144. So the order of the two may depend
           on the GPU.
Use when   Always fuse a norm. Up to rows of 32768 the compiler does it as well as a kernel by hand,
           and torch's own kernel takes longer. Write your own kernel when it does more than the
           norm, as in dropout_norm_test.py. Keep the row in registers while it fits, then on a
           cluster. Where the blocks of a cluster exchange a few numbers in every turn of a loop,
           push them to mbarriers. `../ch10/cluster_reduction_test.py` is about sharing sums in a
           cluster. The backward is norm_backward_test.py.
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
RUNNING = 132 * 8  # programs of walked that an H200 holds at once: 32 registers per thread
L2 = 60 * 2**20
BLOCK, MOST_BLOCKS = 256, 8  # threads of a block of clustered, blocks of its largest cluster
SLICE = 64 * 2**10  # bytes of a row that a block keeps, or more if the largest cluster needs it
THREADS, STAGES = 512, 3  # threads of a block of ring and pushed, and rows in its shared memory


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
    """Return how many blocks share a row."""
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
    """Run a kernel with as many clusters as fit the GPU, but at most one for every 8 rows."""
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
    """Return the cost of a kernel of torch, from the bytes per element that it moves."""
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
            needs=("clusters", "dsmem", "bulk_copy"),
            sass=("UCGABAR_WAIT", "UBLKCP"),
        ),
        Variant(
            pushed,
            when=lambda rows, n: n > LONGEST,
            needs=("clusters", "dsmem", "bulk_copy", "st_async"),
            sass=("UBLKCP", "STAS"),
        ),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": TOTAL // n, "n": n} for n in LENGTHS],
    # Rows begin at multiples of 16 bytes. With 40008, clusters have at least two blocks, which
    # differ in their number of vectors, as some of their threads do. A cluster of ring has more of
    # the 9 rows than fit its shared memory.
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
