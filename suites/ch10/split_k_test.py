"""Skinny product: split k if there are too few tiles to fill the GPU.

Problem    Multiply (m, k) by (k, n) in fp16 with fp32 sums and m = 64. A model computes such a
           linear layer when it decodes 64 requests at once.
Baseline   one_block_a_tile: a program computes a tile of 64 rows over all of k. With tiles of 64
           columns, there are only 64 programs for 132 SMs. With tiles of 32 columns, there are 128
           programs, but `a` is read twice as often.
Optimized  split_k: changes `one_block_a_tile`. 8 programs share a tile, and each computes an eighth
           of k. The programs add their sums with fp32 atomics. One kernel zeroes the sums first,
           and another kernel rounds them at the end.
           two_kernels: changes `split_k`. Each of the 8 programs stores its sums. A second kernel
           adds them in a fixed order and rounds them.
           library: `torch.matmul`.
           Every Triton side is autotuned over the same tile sizes.
Bound      DRAM, from which b is read once. Each tile also reads its rows of a from the L2. In
           `one_block_a_tile`, narrow tiles make the L2 the limit. The cost of the baseline assumes
           tiles of 32 columns, because wider tiles leave half of the SMs idle. The results do not
           record which tiles the autotuner chose. When k is split, even tiles of 128 columns give
           work to every SM, so the L2 is no longer the limit.
Seen       On an H200, all sides take longer than predicted: `split_k` the least, and `library` the
           most, by a little more than a quarter. But `library` has the lowest prediction: its cost
           is one kernel that reads each operand once from DRAM. The cost leaves out repeated reads
           of a from the L2 and, if the library splits k too, the partial sums. We did not record
           which kernels the library launches, so we do not know the cause.
Use when   A product has fewer tiles than the GPU has SMs, and k is long. Use `two_kernels` if the
           result must be the same in every run.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from pytest_aisp import Cost, Variant, Work, compare

M, SPLIT, BLOCK = 64, 8, 1024
# Configurations with three or four stages need 96 KiB of shared memory, which a block can get on
# every arch. Configurations with six stages need 192 KiB.
CONFIGS = [
    triton.Config({"N": 64, "K": 128}, num_warps=4, num_stages=3),
    triton.Config({"N": 64, "K": 128}, num_warps=4, num_stages=6),
    triton.Config({"N": 32, "K": 128}, num_warps=4, num_stages=4),
    triton.Config({"N": 128, "K": 64}, num_warps=4, num_stages=4),
]


def fitting(configs, arguments, **_):
    """Return the configs that fit in the GPU's shared memory. GB10 has only 99 KiB."""
    if triton.runtime.driver.active.get_current_target().arch < 120:
        return configs
    return [config for config in configs if config.num_stages < 6]


PRUNE = {"early_config_prune": fitting}


@triton.jit
def product(a, b, begin, end, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Return this program's sums over k from `begin` to `end`, and the tile's position."""
    i = tl.program_id(1) * M + tl.arange(0, M)
    j = tl.program_id(0) * N + tl.arange(0, N)
    steps = tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for start in range(begin, end, K):
        at = start + steps
        left = (i[:, None] < m) & (at[None, :] < k)
        right = (at[:, None] < k) & (j[None, :] < n)
        x = tl.load(a + i[:, None] * k + at[None, :], mask=left, other=0.0)
        y = tl.load(b + at[:, None] * n + j[None, :], mask=right, other=0.0)
        total = tl.dot(x, y, total)
    return total, i[:, None] * n + j[None, :], (i[:, None] < m) & (j[None, :] < n)


@triton.jit
def piece(k, K: tl.constexpr, SPLIT: tl.constexpr):
    """Return where this program's part of k begins and ends. The part has 0 or more steps of K."""
    length = tl.cdiv(tl.cdiv(k, K), SPLIT) * K
    begin = tl.program_id(2) * length
    return begin, tl.minimum(begin + length, k)


@triton.autotune(CONFIGS, key=["m", "n", "k"], prune_configs_by=PRUNE)
@triton.jit
def tile_kernel(a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    total, where, inside = product(a, b, 0, k, m, n, k, M, N, K)
    tl.store(c + where, total.to(tl.float16), mask=inside)


@triton.autotune(CONFIGS, key=["m", "n", "k"], prune_configs_by=PRUNE, reset_to_zero=["sums"])
@triton.jit
def add_kernel(
    a, b, sums, m, n, k, SPLIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    begin, end = piece(k, K, SPLIT)
    total, where, inside = product(a, b, begin, end, m, n, k, M, N, K)
    tl.atomic_add(sums + where, total, mask=inside, sem="relaxed")


@triton.autotune(CONFIGS, key=["m", "n", "k"], prune_configs_by=PRUNE)
@triton.jit
def store_kernel(
    a, b, parts, m, n, k, SPLIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    begin, end = piece(k, K, SPLIT)
    total, where, inside = product(a, b, begin, end, m, n, k, M, N, K)
    tl.store(parts + tl.program_id(2) * m * n + where, total, mask=inside)


@triton.jit
def sum_kernel(parts, c, count, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(parts + part * count + at, mask=at < count, other=0.0)
    tl.store(c + at, total.to(tl.float16), mask=at < count)


def inputs(device, m, n, k):
    a = torch.randn(m, k, device=device, dtype=torch.float16)
    return a, torch.randn(k, n, device=device, dtype=torch.float16)


def reference(a, b):
    return a.double() @ b.double()


def sizes_of(a, b):
    return len(a), b.shape[1], len(b)


def grid(m, n, pieces):
    return lambda meta: (triton.cdiv(n, meta["N"]), triton.cdiv(m, M), pieces)


def one_block_a_tile(a, b):
    m, n, k = sizes_of(a, b)
    c = torch.empty(m, n, device=a.device, dtype=a.dtype)
    tile_kernel[grid(m, n, 1)](a, b, c, m, n, k, M=M)
    return c


def split_k(a, b):
    m, n, k = sizes_of(a, b)
    sums = torch.zeros(m, n, device=a.device)
    add_kernel[grid(m, n, SPLIT)](a, b, sums, m, n, k, SPLIT=SPLIT, M=M)
    return sums.to(a.dtype)


def two_kernels(a, b):
    m, n, k = sizes_of(a, b)
    parts = torch.empty(SPLIT, m, n, device=a.device)
    store_kernel[grid(m, n, SPLIT)](a, b, parts, m, n, k, SPLIT=SPLIT, M=M)
    c = torch.empty(m, n, device=a.device, dtype=a.dtype)
    sum_kernel[(triton.cdiv(m * n, BLOCK),)](parts, c, m * n, SPLIT=SPLIT, BLOCK=BLOCK)
    return c


def library(a, b):
    return a @ b


def multiplied(m, n, k):
    return Cost(read=2 * (m * k + k * n), ops={"fp16": 2 * m * n * k}, launches=1)


def in_tiles(m, n, k, wide):
    """Return the cost of tiles of M x wide, whose results stay in registers."""
    return replace(multiplied(m, n, k), l2=2 * (n // wide) * (M + wide) * k)


@compare(
    baseline=one_block_a_tile,
    optimized=[
        Variant(split_k, sass="REDG", at_least={"sm90": 1.1}),
        Variant(two_kernels, at_least={"sm90": 1.05}),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 64, "n": 4096, "k": 16384}],
    # The first size is less than a tile, and most parts of k are empty. The second has several
    # tiles, and the last part of k is empty.
    check_sizes=[{"m": 33, "n": 40, "k": 72}, {"m": 65, "n": 73, "k": 1100}],
    work=lambda m, n, k: Work(
        read=2 * (m * k + k * n), write=2 * m * n, flops={"fp16": 2 * m * n * k}, terms=k
    ),
    bound="dram",
    costs={
        one_block_a_tile: lambda m, n, k: in_tiles(m, n, k, wide=32) + Cost(write=2 * m * n),
        # The partial sums stay in the L2, so DRAM traffic does not include them.
        split_k: lambda m, n, k: (
            Cost(l2=4 * m * n, launches=1)
            + in_tiles(m, n, k, wide=128)
            + Cost(atomics=SPLIT * m * n)
            + Cost(l2=6 * m * n, write=2 * m * n, launches=1)
        ),
        two_kernels: lambda m, n, k: (
            in_tiles(m, n, k, wide=128)
            + Cost(l2=4 * SPLIT * m * n)
            + Cost(l2=(4 * SPLIT + 2) * m * n, write=2 * m * n, launches=1)
        ),
        library: lambda m, n, k: replace(multiplied(m, n, k), write=2 * m * n),
    },
)
def test_split_k(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
