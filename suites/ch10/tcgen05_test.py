"""Matrix product on Blackwell: one instruction drives the tensor cores of two blocks.

Problem    c = a b^T in bf16 with fp32 sums. a is (m, k), b is (n, k), and c is (m, n).
Baseline   one_block: a block computes 128 x 128 with tcgen05, with the sums in tensor memory. TMA
           fills a ring of four tiles. One thread issues the loads and the products. All threads
           write results.
Optimized  block_pair: changes `one_block`. The two blocks of a cluster compute 256 x 256. Each
           block loads its own 128 rows of a and half of the 256 rows of b.
           library: `torch.matmul`, for which cuBLASLt chooses a kernel.
Bound      Tensor cores, if shared memory can deliver the operands fast enough. A product of 128 x
           128 x 16 takes 64 cycles on a tensor core and reads 8 KiB. Shared memory can deliver
           exactly 8 KiB in 64 cycles. In a pair, a block reads less per product. The kernels are
           assembled for sm100 and sm103. No GPU has run them yet, so we do not know whether the
           results are right or how long the kernels take.
Use when   Do not use these kernels yet. First run them on sm100 and compare them with the library.
"""

from dataclasses import replace

import torch

from pytest_aisp import Conditions, Cost, Variant, Work, compare, cuda_module, tensor_map

kernels = cuda_module("tcgen05.cu")
M, K, THREADS = 128, 64, 128
RING = 4 * 2 * M * K * 2 + 1024


def inputs(device, m, n, k):
    a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    return a, torch.randn(n, k, device=device, dtype=torch.bfloat16)


def reference(a, b):
    return a.double() @ b.double().t()


def launch(kernel, a, b, blocks):
    c = torch.empty(len(a), len(b), device=a.device, dtype=a.dtype)
    rows, columns = (-(-n // (M * blocks)) for n in c.shape)
    maps = (tensor_map(x, (M, K), swizzle=128) for x in (a, b))
    kernel[(rows * blocks, columns), THREADS, RING](*maps, c, *c.shape, a.shape[1])
    return c


def one_block(a, b):
    return launch(kernels.one_block, a, b, blocks=1)


def block_pair(a, b):
    return launch(kernels.block_pair, a, b, blocks=2)


def library(a, b):
    return a @ b.t()


def multiplied(m, n, k):
    return Cost(read=2 * (m * k + k * n), write=2 * m * n, ops={"bf16": 2 * m * n * k}, launches=1)


def in_tiles(m, n, k, columns):
    """Return the cost of tiles of M x columns, for which a block loads M rows of a and of b."""
    loaded = 2 * (m // M) * (n // columns) * 2 * M * k
    operands = 2 * (m // M) * (n // columns) * (M + columns) * k  # read by the tensor cores
    return replace(multiplied(m, n, k), l2=loaded, shared=loaded + operands)


@compare(
    baseline=one_block,
    optimized=[Variant(block_pair, needs="two_cta"), Variant(library, at_least="yardstick")],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 8192, "n": 8192, "k": 8192}],
    # Rows begin at multiples of 16 bytes, which are 8 elements. The sizes cover less than a tile,
    # several tiles, and one step of k.
    check_sizes=[
        {"m": 33, "n": 40, "k": 72},
        {"m": 300, "n": 264, "k": 520},
        {"m": 257, "n": 776, "k": 64},
    ],
    work=lambda m, n, k: Work(
        read=2 * (m * k + k * n), write=2 * m * n, flops={"bf16": 2 * m * n * k}, terms=k
    ),
    bound="tensor",
    costs={
        one_block: lambda m, n, k: in_tiles(m, n, k, columns=M),
        block_pair: lambda m, n, k: in_tiles(m, n, k, columns=2 * M),
        library: multiplied,
    },
    conditions=Conditions(needs=("tma", "tcgen05")),
)
def test_tcgen05(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
