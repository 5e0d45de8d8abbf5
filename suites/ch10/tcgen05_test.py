"""Matrix product on Blackwell: one instruction for the tensor cores of two blocks.

Problem    c = a b^T, a (m, k), b (n, k) in bf16, summed in fp32, written in bf16.
Baseline   one_block: tcgen05 with sums in tensor memory, 128 x 128 per block, and a ring of four
           tiles that TMA fills. One thread loads and multiplies. All threads write the results.
Optimized  block_pair: of one_block. The two blocks of a cluster compute 256 x 256. Each loads its
           128 rows of a and half of b, so that a product loads half as much of b.
           library: `torch.matmul`, which is cuBLASLt with its own choice of kernel.
Bound      Tensor cores, if shared memory can feed them. A product of 128 x 128 x 16 takes a tensor
           core 64 cycles and reads 8 KiB, which is all that shared memory delivers in 64 cycles.
           A block of a pair reads less per product. The page is assembled for sm100 and sm103. No
           GPU has run it, so nothing is known about its results and times.
Use when   Not yet: run it on sm100 first, and compare it with the library.
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
    """Return the cost of blocks that compute M x columns, and load M rows of a and of b each."""
    loaded = 2 * (m // M) * (n // columns) * 2 * M * k
    operands = 2 * (m // M) * (n // columns) * (M + columns) * k  # read by the tensor cores
    return replace(multiplied(m, n, k), l2=loaded, shared=loaded + operands)


@compare(
    baseline=one_block,
    optimized=[Variant(block_pair, needs="two_cta"), Variant(library, at_least="yardstick")],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 8192, "n": 8192, "k": 8192}],
    # Rows begin at multiples of 16 bytes, which are 8 elements. Less than a tile, several tiles,
    # one step of k.
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
