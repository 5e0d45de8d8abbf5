"""Matrix product in Triton: let the tensor memory accelerator fetch the tiles.

Problem    Multiply fp16 matrices, (m, k) @ (k, n). The sums are fp32, and the result is fp16.
Baseline   pointers: for every tile, each thread computes the addresses of its elements and the
           masks at the edges.
Optimized  descriptors: changes `pointers`. `tl.make_tensor_descriptor` describes the same tiles.
           One thread starts the tensor memory accelerator (TMA), which loads a tile and handles the
           edges.
           library: `torch.matmul`.
Bound      The L2. Each tile of 128 x 128 results reads its rows of a and its columns of b from the
           L2, and these reads take longer than the tensor cores need. TMA does not change the
           number of bytes. TMA saves registers and instructions, which are not the limit here. The
           cost assumes the larger of the tuner's two tile sizes.
Seen       `pointers` and `descriptors` take as long as predicted, so the L2 may be the limit. But
           we read no hardware counters, and the tensor cores may be idle for another reason. The
           rate `fp16` was measured with `torch.matmul`, so `library` reaches it by definition.
Use when   You write a kernel in Triton: `descriptors` need less code than `pointers` and masks, and
           are not slower. For more speed, use larger tiles or call the library.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from pytest_aisp import Cost, Variant, Work, compare

# Three stages of the largest tiles take 96 KiB, which fit in a block's shared memory on every arch.
CONFIGS = [
    triton.Config({"M": 128, "N": 128, "K": 64}, num_warps=8, num_stages=3),
    triton.Config({"M": 128, "N": 64, "K": 64}, num_warps=4, num_stages=3),
]


@triton.jit
def tile_of(m, n, M: tl.constexpr, N: tl.constexpr):
    """Return the row and column of this program's tile. Programs that run at the same time compute
    eight rows of tiles, so they find most of their inputs in the L2."""
    rows, columns = tl.cdiv(m, M), tl.cdiv(n, N)
    group = tl.program_id(0) // (8 * columns)
    height = min(rows - 8 * group, 8)
    inside = tl.program_id(0) % (8 * columns)
    return (8 * group + inside % height) * M, inside // height * N


@triton.autotune(CONFIGS, key=["m", "n", "k"])
@triton.jit
def pointers_kernel(a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    row, column = tile_of(m, n, M, N)
    i, j, steps = row + tl.arange(0, M), column + tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, k, K):
        at = start + steps
        left = (i[:, None] < m) & (at[None, :] < k)
        right = (at[:, None] < k) & (j[None, :] < n)
        x = tl.load(a + i[:, None] * k + at[None, :], mask=left, other=0.0)
        y = tl.load(b + at[:, None] * n + j[None, :], mask=right, other=0.0)
        total = tl.dot(x, y, total)
    inside = (i[:, None] < m) & (j[None, :] < n)
    tl.store(c + i[:, None] * n + j[None, :], total.to(tl.float16), mask=inside)


@triton.autotune(CONFIGS, key=["m", "n", "k"])
@triton.jit
def descriptors_kernel(a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    row, column = tile_of(m, n, M, N)
    left = tl.make_tensor_descriptor(a, shape=[m, k], strides=[k, 1], block_shape=[M, K])
    right = tl.make_tensor_descriptor(b, shape=[k, n], strides=[n, 1], block_shape=[K, N])
    out = tl.make_tensor_descriptor(c, shape=[m, n], strides=[n, 1], block_shape=[M, N])
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, k, K):
        total = tl.dot(left.load([row, start]), right.load([start, column]), total)
    out.store([row, column], total.to(tl.float16))


def inputs(device, m, n, k):
    a = torch.randn(m, k, device=device, dtype=torch.float16)
    return a, torch.randn(k, n, device=device, dtype=torch.float16)


def reference(a, b):
    return a.double() @ b.double()


def launch(kernel, a, b):
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, device=a.device, dtype=a.dtype)
    kernel[lambda meta: (triton.cdiv(m, meta["M"]) * triton.cdiv(n, meta["N"]),)](a, b, c, m, n, k)
    return c


def pointers(a, b):
    return launch(pointers_kernel, a, b)


def scratch(size, alignment, stream):
    """Return memory for a kernel's descriptors: 128 bytes per descriptor and program."""
    return torch.empty(size, device="cuda", dtype=torch.int8)


def descriptors(a, b):
    triton.set_allocator(scratch)
    return launch(descriptors_kernel, a, b)


def library(a, b):
    return a @ b


def multiplied(m, n, k):
    return Cost(read=2 * (m * k + k * n), write=2 * m * n, ops={"fp16": 2 * m * n * k}, launches=1)


def in_tiles(m, n, k, side=128):
    """Return the cost of a product in tiles of side x side results."""
    tiles = (m // side) * (n // side)
    return replace(multiplied(m, n, k), l2=2 * tiles * 2 * side * k + 2 * m * n)


@compare(
    baseline=pointers,
    optimized=[
        Variant(descriptors, needs="tma", at_least="neutral"),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 4096, "n": 4096, "k": 4096}],
    # TMA needs rows that begin at multiples of 16 bytes, which are 8 elements.
    check_sizes=[{"m": 33, "n": 40, "k": 72}, {"m": 130, "n": 72, "k": 136}],
    work=lambda m, n, k: Work(
        read=2 * (m * k + k * n), write=2 * m * n, flops={"fp16": 2 * m * n * k}, terms=k
    ),
    bound="tensor",
    costs={pointers: in_tiles, descriptors: in_tiles, library: multiplied},
)
def test_tma_matmul(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
