"""Softmax: one kernel that keeps a row in registers, and what to do when it does not fit.

Problem    Compute the softmax of each row of fp32 matrices with 2^28 elements. The rows have 256 to
           262144 elements.
Baseline   unfused: the formula in torch, with five operations: the maximum of each row, the
           differences, the exponentials, the sum of each row, and the quotients.
Optimized  fused: changes `unfused`. One Triton kernel loads a row, keeps it in registers, and
           writes the result. A program processes several short rows at once, at least 4096 elements
           together. This kernel runs for rows of up to 32768 elements. A row of 32768 takes 32
           registers per thread in a block of 1024 threads.
           online: changes `unfused`. One Triton kernel makes two passes over the row in steps of
           4096. The first pass finds the maximum and the sum together, as in
           `../ch07/online_softmax_test.py`. This kernel runs for rows of 4096 or more elements.
           clustered: changes `fused`. In CUDA C++, the blocks of a cluster share a row. Each thread
           keeps 8 vectors of 16 bytes in registers and its other vectors in shared memory. The
           blocks exchange their maxima and sums once. This kernel runs for rows of 32768 or more
           elements, and the length must be a multiple of 4. An SM of an H200 holds two blocks, each
           with 128 KiB of a row.
           compiled: changes `unfused`. `torch.compile` compiles the same formula.
           library: `torch.softmax`.
Bound      DRAM. `fused` and `clustered` read and write each element once. `unfused` reads the
           matrix five times and writes it three times. `online` reads a row twice. If the rows of
           all running programs fit in the L2 together, the second read comes from the L2. Rows of
           up to 16384 elements fit. `compiled` has the same traffic, because Inductor also uses the
           online method. `library` reads a row three times if the row does not fit in shared
           memory. With rows of 32768, only one block of fused fits on an SM, so the SM loads
           nothing while the block reduces or stores.
Seen       On an H200, `unfused` takes up to 40 % longer than its memory traffic alone. `library`
           takes about 60 % longer with rows of 4096 and 32768, and as long as predicted with rows
           of 256 and of 262144. With rows of 262144, the prediction counts three reads. So
           `library` gains less than half as much over `unfused` with such rows as with rows of 256.
           We did not time the kernels of `unfused` one by one. With rows of 4096, `compiled` takes
           a fifth longer than `fused`. We did not look at the code of `compiled`. With rows of
           32768, `fused` takes as long as its memory traffic, although its SMs do not load all the
           time. On an H200, `clustered` takes slightly longer than `fused` with rows of 32768. With
           rows of 262144, `clustered` takes a fifth longer than its memory traffic. On an H100 with
           rows of 262144, `clustered` takes a tenth longer than its memory traffic, and `compiled`
           takes as long as its three passes.
Use when   Always fuse a softmax. Keep a row in registers if it fits. If not, keep it in the shared
           memory of a cluster. On GPUs without clusters, use the online method. If the softmax is
           part of attention or of a loss, do not write the softmax at all: see attention_test.py
           and cross_entropy_test.py.
"""

import functools

import torch
import triton
import triton.language as tl

from pytest_aisp import Cost, Sweep, Variant, Work, compare, cuda_module

kernels = cuda_module("softmax.cu")

TOTAL = 2**28  # elements of a matrix
STEP = 4096
LONGEST = 32768  # elements of a row that fused keeps in registers
LENGTHS = (256, 4096, 32768, 262144)
RUNNING = 132 * 4  # programs of online that run on an H200: 60 registers per thread
TORCH = 132 * 2  # blocks of torch's kernel, of 1024 threads each, that run on an H200
L2 = 60 * 2**20
BLOCK, MOST_BLOCKS = 256, 8  # clustered: threads per block, maximum blocks per cluster
HELD = 8 * 16 * BLOCK  # bytes of a row that a block keeps in registers
SLICE = 64 * 2**10  # bytes of a row per block; if that takes over 8 blocks, each keeps more


@triton.jit
def fused_kernel(x, out, rows, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, BLOCK)
    at = row[:, None] * n + lanes[None, :]
    inside = (row[:, None] < rows) & (lanes[None, :] < n)
    # Not -inf: rows beyond the last would compute -inf - -inf, which is NaN.
    value = tl.load(x + at, mask=inside, other=-3.4028234e38)
    value = tl.exp(value - tl.max(value, axis=1)[:, None])
    scale = 1 / tl.sum(value, axis=1)
    tl.store(out + at, value * scale[:, None], mask=inside)


@triton.jit
def online_kernel(x, out, n, STEP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n
    lanes = tl.arange(0, STEP)
    most = tl.full((STEP,), -3.4028234e38, tl.float32)
    total = tl.zeros((STEP,), tl.float32)
    for start in range(0, n, STEP):
        at = start + lanes
        value = tl.load(x + row + at, mask=at < n, other=float("-inf"))
        larger = tl.maximum(most, value)
        total = total * tl.exp(most - larger) + tl.exp(value - larger)
        most = larger
    largest = tl.max(most)
    scale = 1 / tl.sum(total * tl.exp(most - largest))
    for start in range(0, n, STEP):
        at = start + lanes
        value = tl.load(x + row + at, mask=at < n)
        tl.store(out + row + at, tl.exp(value - largest) * scale, mask=at < n)


def inputs(device, rows, n):
    return (torch.randn(rows, n, device=device),)


def reference(x):
    return x.double().softmax(dim=1)


def formula(x):
    weights = torch.exp(x - x.amax(dim=1, keepdim=True))
    return weights / weights.sum(dim=1, keepdim=True)


def unfused(x):
    return formula(x)


def fused(x):
    rows, n = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(n)
    at_once = max(STEP // block, 1)
    warps = min(max(at_once * block // 1024, 4), 32)
    grid = (triton.cdiv(rows, at_once),)
    fused_kernel[grid](x, out, rows, n, ROWS=at_once, BLOCK=block, num_warps=warps)
    return out


def online(x):
    out = torch.empty_like(x)
    online_kernel[(len(x),)](x, out, x.shape[1], STEP=STEP, num_warps=8)
    return out


def clustered(x):
    (rows, n), out = x.shape, torch.empty_like(x)
    if n % 4:
        raise ValueError(f"rows of {n} elements; clustered needs a multiple of 4")
    blocks = min(triton.next_power_of_2(triton.cdiv(4 * n, SLICE)), MOST_BLOCKS)
    shared = max(16 * triton.cdiv(n, 4 * blocks) - HELD, 0)
    launch = kernels.clustered.launch((blocks, rows), BLOCK, shared, cluster=(blocks, 1))
    launch(x, out, n)
    return out


@functools.cache
def compiled_formula():
    return torch.compile(formula, dynamic=False)


def compiled(x):
    return compiled_formula()(x)


def library(x):
    return torch.softmax(x, dim=1)


def matrix(rows, n, reads, writes, row_reads=0, row_writes=0):
    """Return the cost of a kernel that reads and writes matrices, and a few numbers per row."""
    return Cost(
        read=4 * rows * (reads * n + row_reads),
        write=4 * rows * (writes * n + row_writes),
        launches=1,
    )


def unfused_cost(rows, n):
    return (
        matrix(rows, n, reads=1, writes=0, row_writes=1)
        + matrix(rows, n, reads=1, writes=1, row_reads=1)
        + matrix(rows, n, reads=1, writes=1)
        + matrix(rows, n, reads=1, writes=0, row_writes=1)
        + matrix(rows, n, reads=1, writes=1, row_reads=1)
    )


def one_kernel(rows, n, reads=1, exponentials=1):
    elements = rows * n
    return Cost(
        read=4 * reads * elements,
        write=4 * elements,
        sfu=exponentials * elements,
        ops={"fp32": 4 * elements},
        launches=1,
    )


def walked(rows, n, times, exponentials, running):
    """Return the cost of `times` passes over a row. DRAM is read once if the rows fit in the L2."""
    in_work = 4 * n * min(rows, running)
    return one_kernel(rows, n, reads=1 if in_work < L2 else times, exponentials=exponentials)


def walked_twice(rows, n):
    return walked(rows, n, times=2, exponentials=3, running=RUNNING)


def library_cost(rows, n):
    """Return the cost of torch's kernel, which reads rows that exceed shared memory three times."""
    return walked(rows, n, times=3, exponentials=2, running=TORCH)


@compare(
    baseline=unfused,
    optimized=[
        Variant(fused, when=lambda rows, n: n <= LONGEST),
        Variant(online, when=lambda rows, n: n >= STEP),
        Variant(
            clustered,
            when=lambda rows, n: n >= LONGEST,
            needs=("clusters", "dsmem"),
            sass=("UCGABAR_WAIT", "LDGSTS.E.BYPASS.128"),
        ),
        compiled,
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": TOTAL // n, "n": n} for n in LENGTHS],
    # Rows begin at multiples of 16 bytes. With 17000 elements, clustered uses two blocks per row.
    # Some threads have one vector in shared memory, and others have none.
    check_sizes=[
        {"rows": 17, "n": 252},
        {"rows": 2, "n": 9004},
        {"rows": 3, "n": 17000},
    ],
    work=lambda rows, n: Work(read=4 * rows * n, write=4 * rows * n, terms=n, roundings=3),
    bound="dram",
    costs={
        unfused: unfused_cost,
        **dict.fromkeys([fused, clustered], one_kernel),
        **dict.fromkeys([online, compiled], walked_twice),  # compiled also uses the online method
        library: library_cost,
    },
    sweep=Sweep("n"),
)
def test_softmax(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
