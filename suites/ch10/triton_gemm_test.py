"""Matrix product in Triton: from a program a tile to warps that only load.

Problem    (m, k) @ (k, n) in fp16, summed in fp32, written in fp16.
Baseline   tiles: one program per tile, eight rows of tiles at a time so that the L2 is reused.
           Three tiles are in flight, fetched through pointers. This is Triton's tutorial product.
Optimized  persistent: of tiles. One program per SM takes tile after tile, in the same order.
           descriptors: of persistent. The tensor memory accelerator (TMA) loads and stores tiles.
           flattened: of descriptors. Both loops become one, so that the first tiles of the next
           result are fetched while the last ones of this result are multiplied and stored.
           specialized: of descriptors. Some warps load, others multiply.
           library: `torch.matmul`.
           Every side is tuned over the same tiles.
Bound      Tensor cores, at the rate that the power limit allows. Storing a tile adds to that on all
           sides but flattened and specialized. The cost counts the tiles of 128 x 256, the largest
           ones. Which tiles the tuner chose is not stored.
           Triton specializes only kernels of 4 warps, to which it adds others. It ignores the
           option in kernels of 8 warps, and in a flattened loop on Hopper. Only loads by TMA are
           flattened, because Triton would prefetch only part of what pointers load.
           library takes longer here than in `pipeline_stages_test.py`, where the same product is
           timed in turn with a slower side. A slower side may leave more power, but power was not
           stored, so this is not explained. Compare only sides of one page.
Use when   A product in Triton needs speed: use descriptors, then flatten the loop. A persistent
           loop alone gains nothing. The library is as fast, if it has the operation.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from pytest_aisp import Cost, Variant, Work, compare

CONFIGS = [
    triton.Config({"M": 128, "N": n, "K": 64}, num_warps=warps, num_stages=3)
    for n, warps in ((64, 4), (128, 4), (128, 8), (256, 4), (256, 8))
]


def launchable(configs, named, WARPS=False, **meta):
    """Keep configs whose tiles fit, three of a and b and one of results. WARPS needs 4 warps."""
    driver = triton.runtime.driver.active
    most = driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"]

    def needed(M, N, K):
        return 2 * (3 * (M + N) * K + M * N) + 1024

    return [
        config
        for config in configs
        if needed(**config.kwargs) <= most and not (WARPS and config.num_warps > 4)
    ]


def tuned(*switches):
    """Tune a kernel for each size, and for each value of `switches` if sides share the kernel."""
    return triton.autotune(
        CONFIGS,
        key=["m", "n", "k", *switches],
        prune_configs_by={"early_config_prune": launchable},
    )


@triton.jit
def tile_of(index, m, n, M: tl.constexpr, N: tl.constexpr):
    """Return which tile comes at `index`. Eight rows of tiles at a time reuse the L2."""
    rows, columns = tl.cdiv(m, M), tl.cdiv(n, N)
    group = index // (8 * columns)
    height = min(rows - 8 * group, 8)
    inside = index % (8 * columns)
    return (8 * group + inside % height) * M, inside // height * N


@triton.jit
def product(a, b, c, row, column, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
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


@tuned()
@triton.jit
def tiles_kernel(a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    row, column = tile_of(tl.program_id(0), m, n, M, N)
    product(a, b, c, row, column, m, n, k, M, N, K)


@tuned()
@triton.jit
def persistent_kernel(a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    count = tl.cdiv(m, M) * tl.cdiv(n, N)
    for index in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        row, column = tile_of(index, m, n, M, N)
        product(a, b, c, row, column, m, n, k, M, N, K)


@tuned("FLAT", "WARPS")
@triton.jit
def descriptors_kernel(
    a,
    b,
    c,
    m,
    n,
    k,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    FLAT: tl.constexpr,
    WARPS: tl.constexpr,
):
    left = tl.make_tensor_descriptor(a, shape=[m, k], strides=[k, 1], block_shape=[M, K])
    right = tl.make_tensor_descriptor(b, shape=[k, n], strides=[n, 1], block_shape=[K, N])
    out = tl.make_tensor_descriptor(c, shape=[m, n], strides=[n, 1], block_shape=[M, N])
    count = tl.cdiv(m, M) * tl.cdiv(n, N)
    for index in tl.range(
        tl.program_id(0), count, tl.num_programs(0), flatten=FLAT, warp_specialize=WARPS
    ):
        row, column = tile_of(index, m, n, M, N)
        total = tl.zeros((M, N), tl.float32)
        for start in range(0, k, K):
            total = tl.dot(left.load([row, start]), right.load([start, column]), total)
        out.store([row, column], total.to(tl.float16))


def inputs(device, m, n, k):
    a = torch.randn(m, k, device=device, dtype=torch.float16)
    return a, torch.randn(k, n, device=device, dtype=torch.float16)


def reference(a, b):
    return a.double() @ b.double()


def launch(kernel, a, b, programs=None, **options):
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, device=a.device, dtype=a.dtype)

    def grid(meta):
        tiles = triton.cdiv(m, meta["M"]) * triton.cdiv(n, meta["N"])
        return (min(tiles, programs or tiles),)

    kernel[grid](a, b, c, m, n, k, **options)
    return c


def processors(a):
    """Return the number of SMs, or two in the interpreter so that each program has many turns."""
    return torch.cuda.get_device_properties(a.device).multi_processor_count if a.is_cuda else 2


def scratch(size, alignment, stream):
    """Return memory for the descriptors that a kernel makes, 128 bytes each per program."""
    return torch.empty(size, device="cuda", dtype=torch.int8)


def tiles(a, b):
    return launch(tiles_kernel, a, b)


def persistent(a, b):
    return launch(persistent_kernel, a, b, processors(a))


def descriptors(a, b):
    triton.set_allocator(scratch)
    return launch(descriptors_kernel, a, b, processors(a), FLAT=False, WARPS=False)


def flattened(a, b):
    triton.set_allocator(scratch)
    return launch(descriptors_kernel, a, b, processors(a), FLAT=True, WARPS=False)


def specialized(a, b):
    triton.set_allocator(scratch)
    return launch(descriptors_kernel, a, b, processors(a), FLAT=False, WARPS=True)


def library(a, b):
    return a @ b


def multiplied(m, n, k):
    return Cost(read=2 * (m * k + k * n), write=2 * m * n, ops={"fp16": 2 * m * n * k}, launches=1)


def in_tiles(m, n, k):
    """Return the cost of tiles of 128 x 256 that are stored while others are multiplied."""
    return replace(multiplied(m, n, k), l2=2 * (m // 128) * (n // 256) * (128 + 256) * k)


def stored_after(m, n, k):
    """Return the cost of tiles that are multiplied and then stored."""
    return replace(in_tiles(m, n, k), write=0) + Cost(write=2 * m * n)


@compare(
    baseline=tiles,
    optimized=[
        Variant(persistent, at_least="neutral"),
        Variant(descriptors, needs="tma", at_least={"sm90": 1.04}),
        Variant(flattened, needs="tma", at_least={"sm90": 1.05}),
        Variant(specialized, needs="tma", sass="USETMAXREG", at_least={"sm90": 1.04}),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 8192, "n": 8192, "k": 8192}],
    # TMA needs rows that begin at multiples of 16 bytes, which are 8 elements. Less than a tile,
    # several tiles for each program, and more rows of tiles than are taken at a time.
    check_sizes=[
        {"m": 33, "n": 40, "k": 72},
        {"m": 130, "n": 136, "k": 200},
        {"m": 1153, "n": 72, "k": 8},
    ],
    work=lambda m, n, k: Work(
        read=2 * (m * k + k * n), write=2 * m * n, flops={"fp16": 2 * m * n * k}, terms=k
    ),
    bound="tensor",
    costs={
        tiles: stored_after,
        persistent: stored_after,
        descriptors: stored_after,
        flattened: in_tiles,
        specialized: in_tiles,
        library: multiplied,
    },
)
def test_triton_gemm(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
