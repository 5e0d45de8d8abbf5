"""Matrix product in Triton: from one program per tile to warps that only load.

Problem    Multiply (m, k) by (k, n) in fp16 with fp32 sums.
Baseline   tiles: one program per tile, eight rows of tiles at a time, which improves reuse in the
           L2. A program loads through pointers and has three tiles in flight. This is the matrix
           product of Triton's tutorial.
Optimized  persistent: changes `tiles`. One program per SM computes many tiles, in the same order.
           descriptors: changes `persistent`. The tensor memory accelerator (TMA) loads and stores
           tiles.
           flattened: changes `descriptors`. The loops over tiles and over k become one loop. So the
           operands of the next tile are loaded while the current tile is finished and stored.
           specialized: changes `descriptors`. Some warps load, and others multiply.
           library: `torch.matmul`.
           Every Triton side is autotuned over the same tile sizes.
Bound      Tensor cores, at the rate that the power limit allows. On all sides except `flattened`
           and `specialized`, the cost adds the time to store a tile, because nothing overlaps the
           store. The cost assumes the largest tiles, 128 x 256. The results do not record which
           tiles the autotuner chose. Triton specializes warps only in kernels of 4 warps, by adding
           more warps. Triton ignores the option in kernels of 8 warps, and in flattened loops on
           Hopper. This page flattens only the loop with TMA loads. If a flattened loop loads
           through pointers, Triton prefetches only some of the loads. `library` takes longer here
           than in `pipeline_stages_test.py`, where it computes the same product but is timed in
           alternation with a slower side. The slower side may draw less power, which would let the
           GPU run at a higher clock rate. We did not record power, so we cannot confirm this.
           Compare only sides of the same page.
Seen       On an H200, all sides take longer than predicted, even `library`, although the rate
           `fp16` was measured with the same library. So part of the gap is not due to Triton. The
           gap of `tiles` is the largest: up to a quarter. The cost of `tiles` counts no
           instructions for addresses and masks, and no wait for tiles that are not loaded yet.
           `descriptors` computes addresses in hardware, and is faster. We did not profile `tiles`.
Use when   You need a faster matrix product in Triton. First use descriptors, and then flatten the
           loop. A persistent loop alone does not help. If the library has the operation, call the
           library, which is just as fast.
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
    """Return the configs whose tiles fit in shared memory.

    With WARPS, return only configs with 4 warps.
    """
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
    """Return a decorator that autotunes a kernel per size and per value of its `switches`."""
    return triton.autotune(
        CONFIGS,
        key=["m", "n", "k", *switches],
        prune_configs_by={"early_config_prune": launchable},
    )


@triton.jit
def tile_of(index, m, n, M: tl.constexpr, N: tl.constexpr):
    """Return tile `index`'s first row and column. Taking 8 tile rows at a time reuses L2 data."""
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
    """Return the number of SMs. In the interpreter, return 2, so each program has many tiles."""
    return torch.cuda.get_device_properties(a.device).multi_processor_count if a.is_cuda else 2


def scratch(size, alignment, stream):
    """Return `size` bytes of memory for the descriptors that a kernel creates."""
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
    """Return the cost of tiles of 128 x 256, each stored while another one is multiplied."""
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
    # TMA needs rows that begin at multiples of 16 bytes, which are 8 elements. The sizes cover less
    # than a tile, several tiles for each program, and more than 8 rows of tiles.
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
