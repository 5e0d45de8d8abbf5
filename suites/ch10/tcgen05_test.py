"""Matrix product on Blackwell: one instruction for the tensor cores of two blocks.

Problem    c = a b^T, a (m, k), b (n, k) in bf16, summed in fp32, written in bf16.
Baseline   one_block: tcgen05 with sums in tensor memory, 128 x 128 a block, four tiles in a ring
           that TMA fills; one thread loads and multiplies, all of them write the results.
Optimized  block_pair: the same, by the two blocks of a cluster: 256 x 256 for both, each of which
           brings its rows of a and half of b, so that a product reads half as much of b.
           library: `torch.matmul`, that is cuBLASLt with its own choice of kernel.
Bound      Tensor cores: 2 m n k operations, if shared memory can feed them: a 128 x 128 x 16
           product reads 8 KiB of it in 64 cycles of the tensor core, which is all that it can
           read; a pair reads 6 KiB a block. Assembled for sm100 and sm103, never executed: nothing
           is known of its results and times.
"""

import torch

from pytest_aisp import Conditions, Variant, Work, compare, cuda_module, tensor_map

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


@compare(
    baseline=one_block,
    optimized=[Variant(block_pair, needs="two_cta"), Variant(library, at_least="yardstick")],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 8192, "n": 8192, "k": 8192}],
    # Rows begin at multiples of 16 bytes: of 8 elements. One tile and less, several, one k.
    check_sizes=[
        {"m": 33, "n": 40, "k": 72},
        {"m": 300, "n": 264, "k": 520},
        {"m": 257, "n": 776, "k": 64},
    ],
    work=lambda m, n, k: Work(
        read=2 * (m * k + k * n), write=2 * m * n, flops={"bf16": 2 * m * n * k}, terms=k
    ),
    bound="tensor",
    conditions=Conditions(needs=("tma", "tcgen05")),
)
def test_tcgen05(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
