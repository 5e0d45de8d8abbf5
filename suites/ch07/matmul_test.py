"""Matrix product on CUDA cores: what a load feeds decides, from one product to 43.

Problem    C = A @ B in fp32, row-major, 4096 a side: 137 GFLOP on 192 MiB.
Baseline   naive: an element a thread, neighbouring threads neighbouring columns, so every access
           is coalesced. Two loads from L1 feed one product.
Optimized  tiled: 32 x 32 tiles in shared memory. DRAM and L2 send a 32nd; still two loads, now from
           shared memory, feed one product.
           register_tiled: 8 x 16 elements a thread, 128 x 128 a block: 24 loads feed 128 products.
           vectorized: 16 bytes an access, A transposed for it: 6 loads feed 128 products.
           prefetched: two tiles in shared memory, the third on its way in registers, the operands
           of the next step read while this one multiplies; one barrier a tile instead of two.
           library: `torch.matmul`, which is cuBLAS; TF32 is off.
Bound      Issue: an SM starts four instructions a cycle, and only FFMA counts. It reads shared
           memory or L1 at one word a lane and cycle: naive and tiled do half an FFMA a cycle of 4,
           an eighth of the peak or 8 TFLOP/s; broadcasts may make that 0.8 for tiled, so 1.0x to
           1.6x. Of the instructions in the loop 75 % are FFMA in register_tiled, 91 % in
           vectorized and prefetched: 6x and 7.3x at most. What is less is latency, with 8 warps an
           SM; prefetched hides it and predicts 85 % of the library's 51 TFLOP/s or more, 3.2 ms.
Seen       An H200 gains 1.4x, 5.3x, 6.8x and 8.4x, rung by rung; the library gains 8.8x. prefetched
           reaches 95 % of it, 49 TFLOP/s. Its ratio is above 7.3x because naive stops at
           5.8 TFLOP/s and does not reach an eighth of the peak, which is not explained.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Variant, Work, compare, cuda_module

kernels = cuda_module("matmul.cu")
SIDE = 32
TILE, THREADS = 128, 128
WIDE = ("LDG.128", "STS.128", "LDS.128", "STG.128")


def inputs(device, m, n, k):
    return torch.randn(m, k, device=device), torch.randn(k, n, device=device)


def reference(a, b):
    return a.double() @ b.double()


def launch(kernel, a, b, tile, block):
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, device=a.device)
    kernel[(-(-n // tile), -(-m // tile)), block](a, b, c, m, n, k)
    return c


def naive(a, b):
    return launch(kernels.naive, a, b, SIDE, (SIDE, SIDE))


def tiled(a, b):
    return launch(kernels.tiled, a, b, SIDE, (SIDE, SIDE))


def register_tiled(a, b):
    return launch(kernels.register_tiled, a, b, TILE, THREADS)


def vectorized(a, b):
    return launch(kernels.vectorized, a, b, TILE, THREADS)


def prefetched(a, b):
    return launch(kernels.prefetched, a, b, TILE, THREADS)


def library(a, b):
    return a @ b


@compare(
    baseline=naive,
    optimized=[
        Variant(tiled, at_least={"sm90": 1.2}),
        Variant(register_tiled, at_least={"sm90": 4.5}),
        Variant(vectorized, sass=WIDE, at_least={"sm90": 5.7}),
        Variant(prefetched, sass=WIDE, at_least={"sm90": 7.0}),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 4096, "n": 4096, "k": 4096}],
    # Accesses of 16 bytes want n and k to be multiples of 4; the tiles are 128 x 128 and 8 deep.
    check_sizes=[
        {"m": 33, "n": 36, "k": 20},
        {"m": 131, "n": 260, "k": 132},
        {"m": 256, "n": 128, "k": 8},
        {
            "m": st.integers(33, 300),
            "n": st.integers(9, 70).map(lambda fours: 4 * fours),
            "k": st.integers(2, 40).map(lambda fours: 4 * fours),
        },
    ],
    work=lambda m, n, k: Work(
        read=4 * (m * k + k * n), write=4 * m * n, flops={"fp32": 2 * m * n * k}, terms=k
    ),
    bound="issue",
)
def test_matmul(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
