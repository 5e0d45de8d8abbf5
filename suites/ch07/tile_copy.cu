// Copy an m x n fp32 matrix in tiles of 32 x 128 through shared memory.
//
// cp_async: each thread loads 16 bytes at a time, and stores what it loaded.
// tma: one thread makes the tensor memory accelerator load the tile, and then store it.

#include <cuda_pipeline.h>

#include "../tma.cuh"

constexpr unsigned ROWS = 32, COLUMNS = 128, THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
    cp_async(const float4* x, float4* out, unsigned m, unsigned n) {
  constexpr unsigned WIDE = COLUMNS / 4;
  __shared__ float4 tile[ROWS][WIDE];
  const unsigned j = threadIdx.x % WIDE, column = blockIdx.x * WIDE + j, columns = n / 4;
  const unsigned first = threadIdx.x / WIDE, row = blockIdx.y * ROWS;
  if (column >= columns) return;
#pragma unroll
  for (unsigned i = first; i < ROWS; i += THREADS / WIDE) {
    if (row + i < m) {
      const unsigned long long at = static_cast<unsigned long long>(row + i) * columns + column;
      __pipeline_memcpy_async(&tile[i][j], &x[at], sizeof(float4));
    }
  }
  __pipeline_commit();
  __pipeline_wait_prior(0);  // no barrier: a thread reads only its own loads
#pragma unroll
  for (unsigned i = first; i < ROWS; i += THREADS / WIDE) {
    if (row + i < m) out[static_cast<unsigned long long>(row + i) * columns + column] = tile[i][j];
  }
}

extern "C" __global__ void __launch_bounds__(32)
    tma(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to) {
  __shared__ alignas(128) float tile[ROWS][COLUMNS];
  __shared__ alignas(8) unsigned long long arrived;
  if (threadIdx.x != 0) return;
  const int row = blockIdx.y * ROWS, column = blockIdx.x * COLUMNS;
  init_barrier(&arrived, 1);
  fence_barriers();
  expect_bytes(&arrived, sizeof(tile));
  load_tile(tile, from, row, column, &arrived);
  wait_phase(&arrived, 0);
  store_tile(to, tile, row, column);
  wait_stores_read();
}
