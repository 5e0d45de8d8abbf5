"""How many tiles a matrix product should have in flight: Triton's num_stages, from 1 to 4.

Problem    Multiply (m, k) by (k, n) in fp16 with fp32 sums.
Baseline   one: a program loads a tile of a and a tile of b, waits for them, and multiplies them.
           After that, it loads the next tiles. This is `num_stages=1`. Triton's default is 3.
Optimized  two: changes one. `cp.async` loads the next tiles during a product. In this and the next
           two variants, only `num_stages` changes. With two or more stages, Triton also lets a
           product run until the next product has been issued.
           three: changes two. The loads of two steps are in flight.
           four: changes three. The loads of three steps are in flight. Shared memory then holds
           only one block per SM instead of two.
           library: `torch.matmul`.
Bound      The L2: each tile of 128 x 128 results reads its operands from it. The cost of `one` adds
           the time of the tensor cores to the time of the L2, because loads and products do not
           overlap. Two blocks share an SM, but the measured time shows little overlap between them.
Seen       `two` takes longer than predicted. Before each product, `two` waits for all of its copies
           (`cp.async.wait_group 0` in Triton 3.9's PTX). `three` takes the predicted time. The only
           difference is that `three` leaves the copies of one step in flight when it waits. So the
           loads of one step do not hide the latency of the L2, and the loads of two steps do.
Use when   Use three stages, and also measure two and four. Each stage needs shared memory, so fewer
           blocks may fit on an SM.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from pytest_aisp import Cost, Variant, Work, compare

M, N, K = 128, 128, 64


@triton.jit
def tile_of(m, n, M: tl.constexpr, N: tl.constexpr):
    """Return this tile's first row and column. Taking 8 tile rows at a time reuses L2 data."""
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


def products(m, n, k):
    return Cost(ops={"fp16": 2 * m * n * k})


def fetched(m, n, k):
    return Cost(read=2 * (m * k + k * n), l2=2 * (m // M) * (n // N) * (M + N) * k, launches=1)


def results(m, n):
    return Cost(write=2 * m * n)


def one_after_the_other(m, n, k):
    return fetched(m, n, k) + products(m, n, k) + results(m, n)


def overlapped(m, n, k):
    return replace(fetched(m, n, k), ops=products(m, n, k).ops) + results(m, n)


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
    # The sizes have fewer steps than stages, as many, and more. Some rows are not aligned.
    check_sizes=[
        {"m": 33, "n": 41, "k": 65},
        {"m": 130, "n": 72, "k": 199},
        {"m": 1153, "n": 40, "k": 328},
    ],
    work=lambda m, n, k: Work(
        read=2 * (m * k + k * n), write=2 * m * n, flops={"fp16": 2 * m * n * k}, terms=k
    ),
    bound="tensor",
    costs={
        one: one_after_the_other,
        two: overlapped,
        three: overlapped,
        four: overlapped,
        library: lambda m, n, k: Cost(
            read=2 * (m * k + k * n),
            write=2 * m * n,
            ops=products(m, n, k).ops,
            launches=1,
        ),
    },
)
def test_pipeline_stages(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
