// Attention of heads of 128 with mma.sync (mma_attention.cuh).
//
// tma: one thread loads the tiles with the tensor memory accelerator.

#include "mma_attention.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    tma(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
        const __grid_constant__ CUtensorMap v, __nv_bfloat16* out, int tokens, float scale,
        int causal) {
  __shared__ alignas(8) unsigned long long full[STAGES];
  unsigned char *queries = aligned(memory), *stages = queries + Q_BYTES;
  const int steps = tiles_of_keys(tokens, causal), head = blockIdx.y;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) init_barrier(&full[stage], 1);
    fence_barriers();
  }
  __syncthreads();
  auto load = [&](int step) {
    if (threadIdx.x != 0 || step >= steps) return;
    unsigned char* stage = stages + step % STAGES * STAGE_BYTES;
    unsigned long long* barrier = &full[step % STAGES];
    expect_bytes(barrier, step == 0 ? Q_BYTES + STAGE_BYTES : STAGE_BYTES);
    for (int slab = 0; slab < SLABS; ++slab) {
      if (step == 0) {
        load_head_tile(queries + slab * Q_SLAB, q, head, first_query(), slab * SLAB, barrier);
      }
      load_head_tile(stage + slab * K_SLAB, k, head, step * N, slab * SLAB, barrier);
      load_head_tile(stage + K_BYTES + slab * K_SLAB, v, head, step * N, slab * SLAB, barrier);
    }
  };
  load(0);
  Rows rows;
  for (int step = 0; step < steps; ++step) {
    load(step + 1);
    wait_phase(&full[step % STAGES], step / STAGES % 2);
    attend(rows, shared_address(queries), shared_address(stages + step % STAGES * STAGE_BYTES),
           my_row(), step * N, tokens, scale, causal);
    __syncthreads();  // no thread reads this stage any more; it is filled next
  }
  store(rows, out + head * static_cast<size_t>(tokens) * WIDTH, my_row(), tokens);
}
