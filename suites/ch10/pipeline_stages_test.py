"""How many tiles a matrix product should have in flight: Triton's num_stages, from 1 to 4.

Problem    (m, k) @ (k, n) in fp16, summed in fp32, written in fp16.
Baseline   one: a tile of a and of b is fetched, waited for and multiplied; then the next. What
           `num_stages=1` says; Triton's own default is 3.
Optimized  two: while one tile is multiplied the next is on its way (`cp.async`). The same kernel,
           launched with another number.
           three: two are on their way.
           four: three are.
           library: `torch.matmul`.
Bound      Tensor cores: 2 m n k operations. A step of 128 x 128 x 64 keeps a processor of an H200
           busy for 0.3 us, and its 32 KiB come from the L2 in 0.6 to 1 us. What hides that is other
           blocks and other stages, and both cost shared memory: of blocks with 1, 2 and 3 stages
           two fit a processor (their registers allow no more), with 4 stages one. So 0.6 us of
           work of two blocks against 0.3 + 0.8 us a step of one: half the rate with one stage,
           nearly the whole with two. Predicted over one: two 1.3 to 1.7x, three 1.5 to 1.9x, four
           less than three, for a block alone leaves its first fetch and its stores uncovered.
           sm121 has 99 KiB for a block, which four stages fill with three tiles: its tensor cores
           take operands from registers, so that a tile is free again at once.
Seen       An H200 gains 1.27x from two, 1.9x from three and 1.8x from four. one runs at 45 % of the
           peak, as predicted, but two at 57 %, not nearly the whole. A step takes a block of one
           1.6 us and a block of two 1.3 us: both fit a fetch of 1.3 us, longer than *Bound* has it,
           and 0.3 us of work after it or under it. Two fetches on their way hide more: 77 %. four
           is 3 % behind three, as predicted. one and two run at 1.97 GHz; three, four and cuBLAS
           (2.3x) meet the power limit, at 1.5 to 1.8 GHz.
"""

import torch
import triton
import triton.language as tl

from pytest_aisp import Variant, Work, compare

M, N, K = 128, 128, 64


@triton.jit
def tile_of(m, n, M: tl.constexpr, N: tl.constexpr):
    """Which tile this program computes: eight rows of tiles at a time, so that the L2 is reused."""
    rows, columns = tl.cdiv(m, M), tl.cdiv(n, N)
    group = tl.program_id(0) // (8 * columns)
    height = min(rows - 8 * group, 8)
    inside = tl.program_id(0) % (8 * columns)
    return (8 * group + inside % height) * M, inside // height * N


@triton.jit
def product_kernel(a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
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


def inputs(device, m, n, k):
    a = torch.randn(m, k, device=device, dtype=torch.float16)
    return a, torch.randn(k, n, device=device, dtype=torch.float16)


def reference(a, b):
    return a.double() @ b.double()


def product(a, b, stages):
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, device=a.device, dtype=a.dtype)
    grid = (triton.cdiv(m, M) * triton.cdiv(n, N),)
    product_kernel[grid](a, b, c, m, n, k, M, N, K, num_warps=8, num_stages=stages)
    return c


def one(a, b):
    return product(a, b, 1)


def two(a, b):
    return product(a, b, 2)


def three(a, b):
    return product(a, b, 3)


def four(a, b):
    return product(a, b, 4)


def library(a, b):
    return a @ b


@compare(
    baseline=one,
    optimized=[
        Variant(two, sass="LDGSTS", at_least={"sm90": 1.1}),
        Variant(three, sass="LDGSTS", at_least={"sm90": 1.6}),
        Variant(four, sass="LDGSTS", at_least={"sm90": 1.5}),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 8192, "n": 8192, "k": 8192}],
    # No step, less than one, as many as stages and more; rows that begin at odd addresses.
    check_sizes=[
        {"m": 33, "n": 41, "k": 65},
        {"m": 130, "n": 72, "k": 199},
        {"m": 1153, "n": 40, "k": 328},
    ],
    work=lambda m, n, k: Work(
        read=2 * (m * k + k * n), write=2 * m * n, flops={"fp16": 2 * m * n * k}, terms=k
    ),
    bound="tensor",
)
def test_pipeline_stages(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
