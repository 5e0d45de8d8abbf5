"""Matrix product in CuTe's Python DSL: the same tile as in Triton, with instructions you choose.

Problem    Compute c = a b^T in fp16 with fp32 sums. a is (m, k), and b is (n, k).
Baseline   triton_tiles: a plain product in Triton. One program computes a tile of 128 x 128, in
           steps of 64 along k. Three tiles are in flight, and are loaded through pointers. Triton
           chooses the instructions.
Optimized  All variants except `library` are kernels written with `nvidia-cutlass-dsl`, an optional
           package. These kernels have the same tile, number of warps and order of tiles as
           `triton_tiles`, but their code specifies the layouts and the instructions.
           staged: tiles pass through registers into shared memory, then `ldmatrix` and `mma.sync`.
           ring: changes `staged`. The tensor memory accelerator (TMA) fetches tiles into a ring of
           three, two steps ahead. So two things change: TMA loads instead of threads, and loads
           start earlier.
           wgmma: changes `ring`. The tensor cores read shared memory themselves (`wgmma`). A
           warpgroup computes 64 x 128 results.
           library: `torch.matmul`.
Bound      Tensor cores limit `library`. According to the costs, the L2 limits `triton_tiles`,
           `ring` and `wgmma`, because tiles of 128 x 128 read much data from it. For ring, shared
           memory takes almost as long as the L2, because each of the 8 warps reads its operands
           from shared memory. The costs assume that `mma.sync` is as fast as `wgmma`. If `mma.sync`
           is slower, `ring` takes longer than its cost. In `staged`, loads and products do not
           overlap, so `staged` should be slower than `triton_tiles`, which prefetches. `wgmma`
           should take about as long as `triton_tiles`, which uses the same instruction on Hopper.
           But `wgmma` waits for the products of each step, and only a second block on the SM can
           use the tensor cores during that wait. Triton lets the products of one step overlap with
           the next step.
Seen       On an H100, the kernels in CuTe are slower than `triton_tiles`. `staged` does not
           prefetch, and takes as long as predicted. `ring` takes over a third longer than
           predicted. The costs assume that `mma.sync` is as fast as `wgmma`, but on Hopper
           `mma.sync` reaches less than two thirds of the tensor cores' peak (arXiv 2501.12084).
           `wgmma`, which changes only that instruction, is within a tenth of its prediction.
           `wgmma` is slightly slower than `triton_tiles`, as expected, because it waits for each
           step's products. `library` launches cuBLAS's kernel `nvjet_sm90_hsh_128x256_64x4`, whose
           larger tiles read less from the L2. `triton_tiles` was timed four times, once with each
           variant, and its times differ by an eighth, probably because the clock rate changed. So
           compare a variant only with the time of `triton_tiles` from the same pair.
Use when   A kernel needs a layout or an instruction that Triton does not choose, and there is no
           C++ compiler to build it. For a plain product, call the library. If Triton generates the
           instructions that you need, use Triton, because its code is far shorter.
"""

import importlib.util
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from pytest_aisp import Cost, Variant, Work, compare

ABSENT = importlib.util.find_spec("nvidia_cutlass_dsl") is None
INSTALLED = pytest.mark.skipif(
    ABSENT or not torch.cuda.is_available(),
    reason="needs a GPU and CuTe's Python package: pip install nvidia-cutlass-dsl",
)


@triton.jit
def tiles_kernel(a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    i = tl.program_id(1) * M + tl.arange(0, M)
    j = tl.program_id(0) * N + tl.arange(0, N)
    steps = tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, k, K):
        at = start + steps
        left = (i[:, None] < m) & (at[None, :] < k)
        right = (j[:, None] < n) & (at[None, :] < k)
        x = tl.load(a + i[:, None] * k + at[None, :], mask=left, other=0.0)
        y = tl.load(b + j[:, None] * k + at[None, :], mask=right, other=0.0)
        total = tl.dot(x, y.T, total)
    inside = (i[:, None] < m) & (j[None, :] < n)
    tl.store(c + i[:, None] * n + j[None, :], total.to(tl.float16), mask=inside)


def inputs(device, m, n, k):
    a = torch.randn(m, k, device=device, dtype=torch.float16)
    return a, torch.randn(n, k, device=device, dtype=torch.float16)


def reference(a, b):
    return a.double() @ b.double().t()


def empty(a, b):
    return torch.empty(len(a), len(b), device=a.device, dtype=a.dtype)


def triton_tiles(a, b):
    c = empty(a, b)
    grid = triton.cdiv(len(b), 128), triton.cdiv(len(a), 128)
    sizes = *c.shape, a.shape[1]
    tiles_kernel[grid](a, b, c, *sizes, M=128, N=128, K=64, num_warps=8, num_stages=3)
    return c


def compiled(launcher, *choices, options=None):
    """Return a kernel of `cute_gemm.py`, compiled for all sizes. Pass `arch` if there is no GPU."""
    import cutlass
    from cuda.bindings.driver import CUstream
    from cutlass import cute
    from cutlass.cute.runtime import make_ptr

    from suites.ch09 import cute_gemm

    any_matrix = make_ptr(cutlass.Float16, 16, cute.AddressSpace.gmem, assumed_align=16)
    arguments = [any_matrix] * 3 + [8, 8, 8, CUstream(0), *choices]
    return cute.compile(getattr(cute_gemm, launcher), *arguments, options=options)


def with_cute(a, b, *kernel):
    """Yield the product, computed by a kernel of `cute_gemm.py` that was compiled beforehand."""
    run = compiled(*kernel)
    import cutlass
    from cuda.bindings.driver import CUstream
    from cutlass import cute
    from cutlass.cute.runtime import make_ptr

    def pointer(x):
        address, space = x.data_ptr(), cute.AddressSpace.gmem
        return make_ptr(cutlass.Float16, address, space, assumed_align=16)

    def product():
        c = empty(a, b)
        stream = CUstream(torch.cuda.current_stream().cuda_stream)
        run(pointer(a), pointer(b), pointer(c), *c.shape, a.shape[1], stream)
        return c

    yield product


def staged(a, b):
    yield from with_cute(a, b, "launch_staged")


def ring(a, b):
    yield from with_cute(a, b, "launch_ring", False)


def wgmma(a, b):
    yield from with_cute(a, b, "launch_ring", True)


def library(a, b):
    return a @ b.t()


def multiplied(m, n, k):
    return Cost(read=2 * (m * k + k * n), write=2 * m * n, ops={"fp16": 2 * m * n * k}, launches=1)


def in_tiles(m, n, k):
    """Return the cost of tiles of 128 x 128, each of which reads its operands from the L2."""
    return replace(multiplied(m, n, k), l2=2 * (m // 128) * (n // 128) * (128 + 128) * k)


def read_by_warps(m, n, k):
    """Return the bytes that 8 warps read from shared memory, for 64 x 32 results per warp."""
    written, read = 128 + 128, 8 * (64 + 32)
    return 2 * (m // 128) * (n // 128) * (written + read) * k


def fetched_ahead(m, n, k):
    return replace(in_tiles(m, n, k), shared=read_by_warps(m, n, k))


def one_after_the_other(m, n, k):
    fetched = replace(in_tiles(m, n, k), ops={})
    return fetched + Cost(shared=read_by_warps(m, n, k), ops={"fp16": 2 * m * n * k})


def cute(side, **properties):
    return Variant(side, gpu_only="CuTe's Python package", marks=[INSTALLED], **properties)


@compare(
    baseline=triton_tiles,
    optimized=[
        cute(staged, at_least="yardstick"),
        cute(ring, needs="tma", at_least="yardstick"),
        cute(wgmma, needs=("tma", "wgmma"), at_least="yardstick"),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 4096, "n": 4096, "k": 4096}],
    # Rows begin at multiples of 16 bytes, which are 8 elements. The sizes cover less than a tile,
    # several tiles in each dimension, and fewer and more steps of k than the ring has tiles.
    check_sizes=[
        {"m": 33, "n": 40, "k": 72},
        {"m": 130, "n": 136, "k": 200},
        {"m": 33, "n": 136, "k": 8},
    ],
    work=lambda m, n, k: Work(
        read=2 * (m * k + k * n), write=2 * m * n, flops={"fp16": 2 * m * n * k}, terms=k
    ),
    bound="tensor",
    costs={
        triton_tiles: in_tiles,
        staged: one_after_the_other,
        ring: fetched_ahead,
        wgmma: in_tiles,
        library: multiplied,
    },
)
def test_cute_gemm(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@pytest.mark.skipif(ABSENT, reason="needs CuTe's Python package: pip install nvidia-cutlass-dsl")
class TestCute:
    @pytest.mark.parametrize(
        ("kernel", "instructions"),
        [
            (("launch_staged",), ("ldmatrix", "mma.sync")),
            (("launch_ring", False), ("cp.async.bulk.tensor", "ldmatrix", "mma.sync")),
            (("launch_ring", True), ("cp.async.bulk.tensor", "wgmma.mma_async")),
        ],
    )
    def test_kernels_compile(self, tmp_path, kernel, instructions):
        options = f"--gpu-arch sm_90a --keep-ptx --keep-cubin --dump-dir {tmp_path}"
        artifacts = compiled(*kernel, options=options).artifacts
        assert artifacts.CUBIN
        assert [each for each in instructions if each not in artifacts.PTX] == []

    @pytest.mark.parametrize("products", ["warp_products", "warpgroup_products"])
    def test_pairs_of_results_are_neighbors_in_a_row(self, products):
        """A thread owns whole results. Its result 2 i + 1 is to the right of its result 2 i."""
        from cutlass import cute

        from suites.ch09 import cute_gemm

        found = []

        @cute.jit
        def look():
            layout = getattr(cute_gemm, products)().tv_layout_C_tiled
            found.extend([layout.shape, layout.stride])

        try:  # tracing is enough, because the layouts are static
            cute.compile(look, options="--gpu-arch sm_90a")
        except Exception:
            assert found
        rows = 32 if products == "warp_products" else 128
        (threads, values), (by_thread, by_value) = found
        first, then = offsets(threads, by_thread), offsets(values, by_value)
        repeated = len(set(then.tolist()))
        places = (first[:, None] + then[None, :]).flatten()
        assert sorted(set(places.tolist())) == list(range(len(first) * repeated))
        assert (then[1::2] - then[::2] == rows).all()


def offsets(shape, stride):
    """Return the offset of each index of a layout. The first mode varies fastest."""
    if not isinstance(shape, tuple):
        return torch.arange(shape) * stride
    total = torch.zeros(1, dtype=torch.long)
    for size, step in zip(shape, stride, strict=True):
        total = (offsets(size, step)[:, None] + total[None, :]).flatten()
    return total
