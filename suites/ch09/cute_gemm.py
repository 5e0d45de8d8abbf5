"""Matrix product in CuTe's Python DSL: three kernels with tiles of 128 x 128, 64 of k at a time.

staged: tiles pass through registers into shared memory, then `ldmatrix` and `mma.sync`.
ring: TMA fills a ring of STAGES tiles. The multiplication is the same as in staged.
wgmma: the same ring buffer as ring. The tensor cores read shared memory themselves.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute, pipeline
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.utils import SmemAllocator

M, N, K = 128, 128, 64
STAGES = 3
THREADS = 256
WARPS = THREADS // 32
VECTOR = 8
"""Elements of a load of 16 bytes."""


def tile_layout(stages):
    """Return the layout of `stages` tiles of 128 x 64 in shared memory, swizzled by 128 bytes."""
    kind = warpgroup.SmemLayoutAtomKind.K_SW128
    atom = warpgroup.make_smem_layout_atom(kind, cutlass.Float16)
    return cute.tile_to_shape(atom, (M, K, stages), order=(0, 1, 2))


def warp_products():
    """Return 2 x 4 warps with `mma.sync`. Each computes 64 x 32 results of a tile."""
    op = warp.MmaF16BF16Op(cutlass.Float16, cutlass.Float32, (16, 8, 16))
    return cute.make_tiled_mma(op, cute.make_layout((2, 4, 1)), permutation_mnk=(32, 64, 16))


def warpgroup_products():
    """Return two warpgroups with `wgmma`. Each computes 64 x 128 results of a tile."""
    major = warpgroup.OperandMajorMode.K
    op = warpgroup.MmaF16BF16Op(
        cutlass.Float16,
        cutlass.Float32,
        (64, N, 16),
        warpgroup.OperandSource.SMEM,
        major,
        major,
    )
    return cute.make_tiled_mma(op, cute.make_layout((2, 1, 1)))


@cute.jit
def load_tile(x, tile, shared):
    """Copy a tile of 128 x 64 of x into shared memory. Elements outside of x become zero.

    Eight threads load a row, 16 bytes each, and 32 rows are loaded at a time.
    """
    thread, _, _ = cute.arch.thread_idx()
    within = cute.make_layout(((8, 32), (VECTOR, 4)), stride=((VECTOR * M, 1), (M, 32)))
    source = cute.composition(cute.local_tile(x, (M, K), tile), within)[thread, None]
    to = cute.composition(shared, within)[thread, None]
    positions = cute.make_identity_tensor(x.shape)
    at = cute.composition(cute.local_tile(positions, (M, K), tile), within)[thread, None]
    values = cute.make_rmem_tensor(cute.make_layout((VECTOR, 4)), cutlass.Float16)
    values.fill(0.0)
    for i in cutlass.range_constexpr(4):
        if cute.elem_less(at[((0, i),)], x.shape):
            cute.autovec_copy(source[((None, i),)], values[None, i])
    for i in cutlass.range_constexpr(4):
        cute.autovec_copy(values[None, i], to[((None, i),)])


@cute.jit
def store_tile(c, mma, total, tile):
    """Round the tile `total` to fp16 and store it, two results at a time.

    c is (m, n / 2), and each element of it holds two results. With `mma.sync` and with `wgmma`, a
    thread's accumulators 2 i and 2 i + 1 are neighbors in a row.
    """
    thread, _, _ = cute.arch.thread_idx()
    rounded = cute.make_rmem_tensor_like(total, cutlass.Float16)
    rounded.store(total.load().to(cutlass.Float16))
    pairs = cute.recast_tensor(rounded, cutlass.Int32)
    places = cute.local_tile(cute.make_identity_tensor((c.shape[0], 2 * c.shape[1])), (M, N), tile)
    mine = mma.get_slice(thread).partition_C(places)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        row, column = mine[2 * i]
        if cute.elem_less((row, column // 2), c.shape):
            c[row, column // 2] = pairs[i]


@cute.jit
def multiply_by_warps(mma, total, tile_a, tile_b):
    """Add the product of two tiles to `total`. Each warp loads its operands with `ldmatrix`."""
    thread, _, _ = cute.arch.thread_idx()
    mine = mma.get_slice(thread)
    load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), cutlass.Float16)
    load_a, load_b = cute.make_tiled_copy_A(load, mma), cute.make_tiled_copy_B(load, mma)
    x = mma.make_fragment_A(mine.partition_A(tile_a))
    y = mma.make_fragment_B(mine.partition_B(tile_b))
    from_a = load_a.get_slice(thread).partition_S(tile_a)
    from_b = load_b.get_slice(thread).partition_S(tile_b)
    for i in cutlass.range_constexpr(K // 16):
        cute.copy(load_a, from_a[None, None, i], load_a.retile(x)[None, None, i])
        cute.copy(load_b, from_b[None, None, i], load_b.retile(y)[None, None, i])
        cute.gemm(mma, total, x[None, None, i], y[None, None, i], total)


def shared_tiles(memory, stages):
    """Return `stages` tiles of 128 x 64 in shared memory."""
    layout = tile_layout(stages)
    return memory.allocate_tensor(cutlass.Float16, layout.outer, 1024, layout.inner)


@cute.kernel
def staged(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    """Multiply one tile per block. The threads load the next tile after they have multiplied."""
    across, down, _ = cute.arch.block_idx()
    memory = SmemAllocator()
    tile_a = shared_tiles(memory, 1)[None, None, 0]
    tile_b = shared_tiles(memory, 1)[None, None, 0]
    mma = warp_products()
    total = cute.make_rmem_tensor(mma.partition_shape_C((M, N)), cutlass.Float32)
    total.fill(0.0)
    for step in cutlass.range(cute.ceil_div(a.shape[1], K), unroll=1):
        load_tile(a, (down, step), tile_a)
        load_tile(b, (across, step), tile_b)
        cute.arch.sync_threads()
        multiply_by_warps(mma, total, tile_a, tile_b)
        cute.arch.sync_threads()
    store_tile(c, mma, total, (down, across))


@cute.jit
def fetch(ring, state, step, load_a, load_b, of_a, of_b, tiles_a, tiles_b):
    """Wait until the tiles of `state` are free, and fetch the tiles of `step` into them."""
    ring.producer_acquire(state)
    full = ring.producer_get_barrier(state)
    cute.copy(load_a, of_a[None, step], tiles_a[None, state.index], tma_bar_ptr=full)
    cute.copy(load_b, of_b[None, step], tiles_b[None, state.index], tma_bar_ptr=full)


@cute.kernel
def ring(
    load_a: cute.CopyAtom,
    a: cute.Tensor,
    load_b: cute.CopyAtom,
    b: cute.Tensor,
    c: cute.Tensor,
    by_warpgroups: cutlass.Constexpr,
):
    """Multiply one tile per block. The first warp prefetches tiles into a ring of STAGES tiles."""
    across, down, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = SmemAllocator()
    barriers = memory.allocate_array(cutlass.Int64, 2 * STAGES)
    shared_a, shared_b = shared_tiles(memory, STAGES), shared_tiles(memory, STAGES)
    tiles = pipeline.PipelineTmaAsync.create(
        num_stages=STAGES,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, WARPS),
        tx_count=2 * (M + N) * K,
        barrier_storage=barriers,
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
    )
    one = cute.make_layout(1)
    rows = cute.local_tile(a, (M, K), (down, None))
    to_a, of_a = cpasync.tma_partition(
        load_a, 0, one, cute.group_modes(shared_a, 0, 2), cute.group_modes(rows, 0, 2)
    )
    columns = cute.local_tile(b, (N, K), (across, None))
    to_b, of_b = cpasync.tma_partition(
        load_b, 0, one, cute.group_modes(shared_b, 0, 2), cute.group_modes(columns, 0, 2)
    )

    if cutlass.const_expr(by_warpgroups):
        mma = warpgroup_products()
        mma.set(warpgroup.Field.ACCUMULATE, True)
    else:
        mma = warp_products()
    total = cute.make_rmem_tensor(mma.partition_shape_C((M, N)), cutlass.Float32)
    total.fill(0.0)

    steps = cute.ceil_div(a.shape[1], K)
    filled = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
    emptied = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
    for step in cutlass.range_constexpr(STAGES - 1):
        if warp_id == 0 and step < steps:
            fetch(tiles, filled, step, load_a, load_b, of_a, of_b, to_a, to_b)
        filled.advance()
    for step in cutlass.range(steps, unroll=1):
        ahead = step + STAGES - 1
        if warp_id == 0 and ahead < steps:
            fetch(tiles, filled, ahead, load_a, load_b, of_a, of_b, to_a, to_b)
        filled.advance()
        tiles.consumer_wait(emptied)
        stage = emptied.index
        if cutlass.const_expr(by_warpgroups):
            mine = mma.get_slice(cute.arch.make_warp_uniform(thread // 128) * 128)
            x = mma.make_fragment_A(mine.partition_A(shared_a))[None, None, None, stage]
            y = mma.make_fragment_B(mine.partition_B(shared_b))[None, None, None, stage]
            warpgroup.fence()
            cute.gemm(mma, total, x, y, total)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
        else:
            tile_a, tile_b = shared_a[None, None, stage], shared_b[None, None, stage]
            multiply_by_warps(mma, total, tile_a, tile_b)
            cute.arch.sync_warp()
        tiles.consumer_release(emptied)
        emptied.advance()
    store_tile(c, mma, total, (down, across))


def matrices(a, b, c, m, n, k):
    """Return a (m, k), b (n, k) and c (m, n / 2), whose elements hold two results each."""
    k = cute.assume(k, divby=VECTOR)
    pairs = cute.recast_ptr(c, dtype=cutlass.Int32)
    return (
        cute.make_tensor(a, cute.make_layout((m, k), stride=(k, 1))),
        cute.make_tensor(b, cute.make_layout((n, k), stride=(k, 1))),
        cute.make_tensor(pairs, cute.make_layout((m, n // 2), stride=(n // 2, 1))),
    )


@cute.jit
def launch_staged(
    a: cute.Pointer,
    b: cute.Pointer,
    c: cute.Pointer,
    m: cutlass.Int32,
    n: cutlass.Int32,
    k: cutlass.Int32,
    stream: cuda.CUstream,
):
    x, y, z = matrices(a, b, c, m, n, k)
    grid = (cute.ceil_div(n, N), cute.ceil_div(m, M), 1)
    staged(x, y, z).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


@cute.jit
def launch_ring(
    a: cute.Pointer,
    b: cute.Pointer,
    c: cute.Pointer,
    m: cutlass.Int32,
    n: cutlass.Int32,
    k: cutlass.Int32,
    stream: cuda.CUstream,
    by_warpgroups: cutlass.Constexpr,
):
    x, y, z = matrices(a, b, c, m, n, k)
    tile = cute.slice_(tile_layout(1), (None, None, 0))
    op = cpasync.CopyBulkTensorTileG2SOp()
    load_a, x = cpasync.make_tiled_tma_atom(op, x, tile, (M, K))
    load_b, y = cpasync.make_tiled_tma_atom(op, y, tile, (N, K))
    grid = (cute.ceil_div(n, N), cute.ceil_div(m, M), 1)
    ring(load_a, x, load_b, y, z, by_warpgroups).launch(
        grid=grid, block=(THREADS, 1, 1), stream=stream
    )
