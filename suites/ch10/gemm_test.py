"""Matrix product on Hopper: keep the tensor cores busy, from `mma.sync` to cluster multicast.

Problem    c = a b^T in bf16 with fp32 sums. a is (m, k), b is (n, k), and c is (m, n).
Baseline   mma_sync: a block computes a tile of 128 x 128, in steps of 64 along k. The block loads
           its operands through registers into swizzled shared memory, and multiplies with
           `ldmatrix` and `mma.sync`. A warp does not compute while it loads.
           library: `torch.matmul`, for which cuBLAS chooses a kernel. In test_gemm, `library` is
           only for comparison. In test_gemm_beside_the_library, it is the baseline of `stored` and
           `multicast`.
Optimized  cp_async: changes `mma_sync`. `cp.async` fills a ring of three tiles while the tensor
           cores work.
           tma: changes `cp_async`. One thread fills the same ring through the tensor memory
           accelerator (TMA).
           wgmma: changes `tma`. The tensor cores read their operands directly from shared memory. A
           warpgroup computes 64 x 128.
           specialized: changes `wgmma`. A ninth warp fills the ring, without block-wide barriers.
           back_to_back: changes `specialized`. The products of one step may still run when the
           products of the next step start (`wgmma_wait<1>`).
           wide: changes `back_to_back`. Tiles are 128 x 256, so they read a quarter fewer bytes per
           operation. A tile needs twice the registers and more shared memory, so an SM holds one
           block instead of two.
           four_tiles: changes `wide`. The ring has four tiles instead of three.
           persistent: changes `four_tiles`. One block per SM computes many tiles, one after
           another.
           grouped: changes `persistent`. The order of the tiles changes: 8 rows of tiles at a time.
           stored: changes `grouped`. Results are written through shared memory and TMA while the
           next tile is computed.
           multicast: changes `stored`. A cluster has two blocks. Each block loads half of b's tile
           for both.
Bound      Tensor cores from `wide` on, at the rate that the power limit allows. With tiles of 128 x
           128, the L2 is the limit, from which each tile reads its operands. With `mma.sync`,
           shared memory is the limit, because each of the 8 warps reads its operands from it. The
           cost of `mma_sync` adds the times of L2 and shared memory, because a block's loads do not
           overlap its products. Two blocks share an SM, but the measured time shows little overlap
           between them.
Seen       `cp_async` takes 1.5 times as long as predicted, and tma over a quarter longer than
           predicted. `tma` may be closer to its prediction because its threads compute no
           addresses. We did not measure that. On Hopper, `mma.sync` reaches less than two thirds of
           the tensor cores' peak (arXiv 2501.12084). The cost does not include this lower rate. But
           even at this rate, shared memory would take longer than the products. At the power limit,
           the clock rate drifts, and so does the time of `mma_sync`. So compare only sides whose
           timings alternate. In test_gemm, a side's share of the library's rate is the ratio of two
           speedups over `mma_sync`, so the share contains the errors of both speedups.
           test_gemm_beside_the_library times `stored` and `multicast` directly against the library,
           in alternation. Both take as long as the library, within two percent, on an H100 and on
           an H200. The order of the middle rungs depends on the GPU. On an H100, `specialized` is
           slower than `wgmma`, and `back_to_back` is faster than both. On an H200, `specialized` is
           faster than `wgmma`, and `back_to_back` is slower than both. `four_tiles` helps on an
           H200, but not on an H100. `persistent` does not help on an H200. `multicast` helps on
           neither GPU. We did not measure why.
Use when   Call the library. Write this kernel only for a product that the library does not have,
           and start with wide tiles, a warp that only loads, and TMA. Add multicast only if it is
           faster than `stored` for your sizes.
"""

from dataclasses import replace

import torch

from pytest_aisp import Cost, Variant, Work, compare, cuda_module, tensor_map

kernels = cuda_module("gemm.cu")
hopper = cuda_module("gemm_wgmma.cu")
M, K = 128, 64


def ring(wide, stages=4, out=0):
    """Return the bytes of a ring of tiles with `wide` columns, plus `out` bytes for results."""
    return stages * (M + wide) * K * 2 + out + 1024


def inputs(device, m, n, k):
    a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    return a, torch.randn(n, k, device=device, dtype=torch.bfloat16)


def reference(a, b):
    return a.double() @ b.double().t()


def empty(a, b):
    return torch.empty(len(a), len(b), device=a.device, dtype=a.dtype)


def tiles(a, b, wide):
    return -(-len(b) // wide), -(-len(a) // M)


def mma_sync(a, b):
    c = empty(a, b)
    kernels.mma_sync[tiles(a, b, 128), 256, ring(128, stages=1)](a, b, c, *c.shape, a.shape[1])
    return c


def cp_async(a, b):
    c = empty(a, b)
    kernels.cp_async[tiles(a, b, 128), 256, ring(128, stages=3)](a, b, c, *c.shape, a.shape[1])
    return c


def maps(a, b, rows=128):
    return tensor_map(a, (M, K), swizzle=128), tensor_map(b, (rows, K), swizzle=128)


def tma(a, b):
    c = empty(a, b)
    kernels.tma[tiles(a, b, 128), 256, ring(128, stages=3)](*maps(a, b), c, *c.shape, a.shape[1])
    return c


def wgmma(a, b):
    c = empty(a, b)
    launch = hopper.wgmma_tiles[tiles(a, b, 128), 256, ring(128, stages=3)]
    launch(*maps(a, b), c, *c.shape, a.shape[1])
    return c


LOADING = 2 * 128 + 32
"""Threads of a block with two warpgroups that compute and a warp that loads."""


def per_tile(kernel, a, b, wide, stages):
    c = empty(a, b)
    across, down = tiles(a, b, wide)
    launch = kernel[across * down, LOADING, ring(wide, stages)]
    launch(*maps(a, b, wide), c, *c.shape, a.shape[1])
    return c


def specialized(a, b):
    return per_tile(hopper.specialized, a, b, wide=128, stages=3)


def back_to_back(a, b):
    return per_tile(hopper.back_to_back, a, b, wide=128, stages=3)


def wide(a, b):
    return per_tile(hopper.wide, a, b, wide=256, stages=3)


def four_tiles(a, b):
    return per_tile(hopper.four_tiles, a, b, wide=256, stages=4)


def processors(a):
    return torch.cuda.get_device_properties(a.device).multi_processor_count


def per_processor(kernel, a, b):
    c = empty(a, b)
    launch = kernel[processors(a), LOADING, ring(256)]
    launch(*maps(a, b, 256), c, *c.shape, a.shape[1])
    return c


def persistent(a, b):
    return per_processor(hopper.persistent, a, b)


def grouped(a, b):
    return per_processor(hopper.grouped, a, b)


OUT = 2 * 2 * 64 * 64 * 2
"""Bytes of two slices of 64 x 64 results for each of the two warpgroups that compute."""


def stored(a, b):
    c = empty(a, b)
    to = tensor_map(c, (64, 64), swizzle=128)
    launch = hopper.stored[processors(a), LOADING, ring(256, out=OUT)]
    launch(*maps(a, b, 256), to, *c.shape, a.shape[1])
    return c


def multicast(a, b):
    c = empty(a, b)
    to = tensor_map(c, (64, 64), swizzle=128)
    shared = ring(256, out=OUT)
    pairs = hopper.multicast.clusters_at_once(LOADING, shared, cluster=2)
    launch = hopper.multicast[2 * pairs, LOADING, shared]
    launch(*maps(a, b, 128), to, *c.shape, a.shape[1])
    return c


def library(a, b):
    return a @ b.t()


def multiplied(m, n, k):
    """Return the cost of a product that leaves its results in registers.

    DRAM counts each operand once. In fact, b is read from DRAM again for each wave of blocks, but
    DRAM is far from being the limit.
    """
    return Cost(read=2 * (m * k + k * n), ops={"bf16": 2 * m * n * k}, launches=1)


def results(m, n):
    return Cost(write=2 * m * n)


def in_tiles(m, n, k, wide=128, loaded=None):
    """Return the cost of tiles of M x wide. A tile loads `loaded` rows of b, by default `wide`."""
    tiles = m // M * (n // wide)
    return replace(multiplied(m, n, k), l2=2 * tiles * (M + (loaded or wide)) * k)


def shared_by_warps(m, n, k):
    """Return the bytes that 8 warps read from shared memory, for 64 x 32 results per warp."""
    written, read = M + 128, 8 * (64 + 32)
    return 2 * (m // M) * (n // 128) * (written + read) * k


def one_after_the_other(m, n, k):
    fetched = replace(in_tiles(m, n, k), ops={})
    products = Cost(shared=shared_by_warps(m, n, k), ops={"bf16": 2 * m * n * k})
    return fetched + products + results(m, n)


def overlapped(m, n, k):
    return replace(in_tiles(m, n, k), shared=shared_by_warps(m, n, k)) + results(m, n)


def stored_meanwhile(m, n, k, **tile):
    return replace(in_tiles(m, n, k, **tile), write=2 * m * n)


SIZES = [{"m": 8192, "n": 8192, "k": 8192}]
# Rows begin at multiples of 16 bytes, which are 8 elements. The sizes cover less than a tile,
# several tiles in each dimension, and one step of k. At the last size, there are more tiles than
# SMs on an H200, so a persistent block computes a second tile. With 3 steps of k, the second tile
# begins in the middle of the ring.
CHECK_SIZES = [
    {"m": 33, "n": 40, "k": 72},
    {"m": 300, "n": 264, "k": 520},
    {"m": 257, "n": 776, "k": 64},
    {"m": 1500, "n": 3112, "k": 136},
]


def work(m, n, k):
    return Work(read=2 * (m * k + k * n), write=2 * m * n, flops={"bf16": 2 * m * n * k}, terms=k)


def stored_cost(m, n, k):
    return stored_meanwhile(m, n, k, wide=256)


def multicast_cost(m, n, k):
    return stored_meanwhile(m, n, k, wide=256, loaded=128)


def library_cost(m, n, k):
    return replace(multiplied(m, n, k), write=2 * m * n)


@compare(
    baseline=mma_sync,
    optimized=[
        Variant(cp_async, sass=("LDGSTS", "HMMA"), at_least={"sm90": 1.1}),
        Variant(tma, needs="tma", sass="HMMA", at_least={"sm90": 1.4}),
        Variant(wgmma, needs=("tma", "wgmma"), sass="HGMMA", at_least={"sm90": 1.65}),
        Variant(specialized, needs=("tma", "wgmma"), sass="HGMMA", at_least={"sm90": 1.65}),
        Variant(back_to_back, needs=("tma", "wgmma"), sass="HGMMA", at_least={"sm90": 1.65}),
        Variant(wide, needs=("tma", "wgmma"), sass="HGMMA", at_least={"sm90": 2.2}),
        Variant(four_tiles, needs=("tma", "wgmma"), sass="HGMMA", at_least={"sm90": 2.4}),
        Variant(persistent, needs=("tma", "wgmma"), sass="HGMMA", at_least={"sm90": 2.4}),
        Variant(grouped, needs=("tma", "wgmma"), sass="HGMMA", at_least={"sm90": 2.5}),
        Variant(stored, needs=("tma", "wgmma"), sass=("STSM", "UTMASTG"), at_least={"sm90": 2.6}),
        Variant(
            multicast,
            needs=("tma", "wgmma", "multicast"),
            sass=("STSM", "UTMASTG"),
            at_least={"sm90": 2.6},
        ),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=SIZES,
    check_sizes=CHECK_SIZES,
    work=work,
    bound="tensor",
    costs={
        mma_sync: one_after_the_other,
        cp_async: overlapped,
        tma: overlapped,
        **dict.fromkeys(
            (wgmma, specialized, back_to_back),
            lambda m, n, k: in_tiles(m, n, k) + results(m, n),
        ),
        **dict.fromkeys(
            (wide, four_tiles, persistent, grouped),
            lambda m, n, k: in_tiles(m, n, k, wide=256) + results(m, n),
        ),
        stored: stored_cost,
        multicast: multicast_cost,
        library: library_cost,
    },
)
def test_gemm(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@compare(
    baseline=library,
    optimized=[
        Variant(stored, needs=("tma", "wgmma"), sass=("STSM", "UTMASTG")),
        Variant(multicast, needs=("tma", "wgmma", "multicast"), sass=("STSM", "UTMASTG")),
    ],
    inputs=inputs,
    reference=reference,
    sizes=SIZES,
    check_sizes=CHECK_SIZES,
    work=work,
    bound="tensor",
    versus="library",
    at_least={"sm90": 0.95},
    costs={library: library_cost, stored: stored_cost, multicast: multicast_cost},
)
def test_gemm_beside_the_library(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
