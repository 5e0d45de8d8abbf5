"""Matrix product on CUDA cores: compute more products for each value that is loaded.

Problem    Compute C = A @ B in fp32. All matrices are 4096 by 4096 and row-major.
Baseline   naive: a thread computes one element of C, and neighboring threads have neighboring
           columns, so every access is coalesced. Each product needs two loads from the L1.
Optimized  tiled: changes `naive`. The values come from 32 x 32 tiles in shared memory, so L2 and
           DRAM deliver only 1/32 of the values. Each product still needs two loads, now from shared
           memory.
           register_tiled: changes `tiled`. There are 8 x 16 elements per thread and 128 x 128 per
           block, so 24 values from shared memory are enough for 128 products.
           vectorized: changes `register_tiled`. Accesses are 16 bytes long, so 6 loads are enough
           for 128 products. The tile of A is transposed in shared memory for these accesses.
           prefetched: changes `vectorized`. There are two tiles in shared memory. The next tile and
           the next operands are loaded during the products, and a tile needs one barrier instead of
           two.
           library: `torch.matmul`, which calls cuBLAS. TF32 is off.
Bound      The fp32 units limit `prefetched` and `library`. Shared memory limits `tiled`: it
           delivers one word per lane and cycle, and a product needs two words, so the fp32 units
           are idle most of the time. The compiler loads four values of A at once, which saves
           instructions, but shared memory delivers the same number of words. The L1 uses the same
           data path as shared memory, so `naive` has the same limit.
Seen       `naive` takes longer than its loads would take at the rate of shared memory. We cannot
           explain this. `register_tiled` and `vectorized` take longer than their products alone
           would take. Per iteration of the loop over tiles, `register_tiled` has 1375 instructions
           and `vectorized` has 1126. In each, 1024 instructions are FFMA (nvcc 13.0 for sm_90). The
           ratio of the two times is about 1375 to 1126. `prefetched` also has 1126 instructions and
           is faster, so `vectorized` must also wait for loads and barriers. The rate `fp32` was
           measured with `torch.matmul`, so `library` reaches it by definition.
Use when   You need a product in full fp32 that no library offers, for example one that is fused
           with other work. For a plain product, call the library. If TF32 or bf16 is precise
           enough, tensor cores are several times as fast.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

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


def product(m, n, k, shared=0):
    operands, ops = 4 * (m * k + k * n), {"fp32": 2 * m * n * k}
    return Cost(read=operands, write=4 * m * n, shared=shared, ops=ops, launches=1)


def naive_product(m, n, k):
    return product(m, n, k, shared=8 * m * n * k)  # the L1 has the data path of shared memory


def tiled_product(m, n, k):
    loads, stores = 8 * m * n * k, 8 * m * n * k / SIDE
    return product(m, n, k, shared=loads + stores)


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
    # Accesses of 16 bytes need n and k to be multiples of 4. The tiles are 128 x 128 and 8 deep.
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
    costs={
        naive: naive_product,
        tiled: tiled_product,
        **dict.fromkeys([register_tiled, vectorized, prefetched, library], product),
    },
)
def test_matmul(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
