// Attention of heads of 128 with mma.sync (mma_attention.cuh).
//
// mma_sync: all threads copy tiles with cp.async.

#include <cuda_pipeline.h>

#include "mma_attention.cuh"

// Calls each(row, slab, piece) for this thread's pieces of a tile. Neighboring threads get
// neighboring pieces.
template <int height, typename Each>
__device__ void pieces(Each each) {
#pragma unroll 4
  for (unsigned at = threadIdx.x; at < height * SLABS * PIECES; at += THREADS) {
    each(at / (SLABS * PIECES), at / PIECES % SLABS, at % PIECES);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    mma_sync(const __nv_bfloat16* q, const __nv_bfloat16* k, const __nv_bfloat16* v,
             __nv_bfloat16* out, int tokens, float scale, int causal) {
  unsigned char *queries = aligned(memory), *stages = queries + Q_BYTES;
  const size_t head = blockIdx.y * static_cast<size_t>(tokens) * WIDTH;
  const int steps = tiles_of_keys(tokens, causal);
  auto copy = [=](unsigned char* to, const __nv_bfloat16* from, int row, unsigned slab,
                  unsigned piece) {
    const bool inside = row < tokens;
    const __nv_bfloat16* source = from + head;
    if (inside) source += static_cast<size_t>(row) * WIDTH + slab * SLAB + piece * 8;
    __pipeline_memcpy_async(to, source, 16, inside ? 0 : 16);  // beyond the last row: zeros
  };
  auto load = [&](int step) {
    if (step < steps) {
      unsigned char* stage = stages + step % STAGES * STAGE_BYTES;
      pieces<N>([=](unsigned row, unsigned slab, unsigned piece) {
        unsigned char* to = stage + slab * K_SLAB + place(row, piece);
        copy(to, k, step * N + row, slab, piece);
        copy(to + K_BYTES, v, step * N + row, slab, piece);
      });
    }
    __pipeline_commit();  // also if empty, because wait_prior counts groups
  };
  pieces<M>([=](unsigned row, unsigned slab, unsigned piece) {
    copy(queries + slab * Q_SLAB + place(row, piece), q, first_query() + row, slab, piece);
  });
  load(0);
  Rows rows;
  for (int step = 0; step < steps; ++step) {
    load(step + 1);
    __pipeline_wait_prior(1);
    __syncthreads();  // all threads can read this stage
    attend(rows, shared_address(queries), shared_address(stages + step % STAGES * STAGE_BYTES),
           my_row(), step * N, tokens, scale, causal);
    __syncthreads();  // no thread reads this stage any more; it is filled next
  }
  store(rows, out + head, my_row(), tokens);
}
