// h = relu(0.75 h + x) along each row, and every h is written. Each h needs the previous one, so
// one thread computes a whole row.
//
// synchronous: tiles of 64 rows and 32 steps, loaded into registers and stored to shared memory.
// one_stage: the same tiles, loaded with `cp.async`, which copies to shared memory without
//     registers.
// two_stages: the next tile is fetched while a block computes the current one.
// four_stages: the next three tiles are fetched while a block computes the current one.
//
// A row has `groups` groups of 4 steps, so it begins at a multiple of 16 bytes.

#include <cuda_pipeline.h>

constexpr int ROWS = 64;   // per block, one per thread
constexpr int GROUPS = 8;  // per row of a tile: 128 bytes

// Each row has an extra group, so 8 lanes that read 16 bytes from 8 rows use different banks.
struct Tile {
  float4 at[ROWS][GROUPS + 1];
};

// NaN stays NaN, as in torch.
__device__ float next(float h, float x) {
  const float sum = 0.75f * h + x;
  return sum < 0.0f ? 0.0f : sum;
}

__device__ void walk(Tile& tile, float& h) {
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
    float4 x = tile.at[threadIdx.x][group];
    x.x = h = next(h, x.x);
    x.y = h = next(h, x.y);
    x.z = h = next(h, x.z);
    x.w = h = next(h, x.w);
    tile.at[threadIdx.x][group] = x;
  }
}

// Neighboring threads move neighboring groups. Eight threads move the 128 bytes of a row, and a
// thread moves a group of every 8th row. Threads without a row read the last row again, and do not
// write its results.
constexpr int APART = ROWS / GROUPS;
__device__ int row_of(int i) { return threadIdx.x / GROUPS + i * APART; }
__device__ int group_of() { return threadIdx.x % GROUPS; }

template <bool asynchronous>
__device__ void fetch(Tile& tile, const float4* __restrict__ x, int rows, int groups, int first) {
  if (first + group_of() < groups) {
    float4 part[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      const int row = min(int(blockIdx.x) * ROWS + row_of(i), rows - 1);
      const float4* from = x + size_t(row) * groups + first + group_of();
      if constexpr (asynchronous) {
        __pipeline_memcpy_async(&tile.at[row_of(i)][group_of()], from, sizeof(float4));
      } else {
        part[i] = __ldg(from);
      }
    }
    if constexpr (!asynchronous) {  // all loads are issued before the first store
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) tile.at[row_of(i)][group_of()] = part[i];
    }
  }
  if constexpr (asynchronous) __pipeline_commit();  // even without a tile: waits count commits
}

__device__ void write(const Tile& tile, float4* __restrict__ out, int rows, int groups, int first) {
  if (first + group_of() >= groups) return;
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
    const int row = blockIdx.x * ROWS + row_of(i);
    const float4 part = tile.at[row_of(i)][group_of()];
    if (row < rows) out[size_t(row) * groups + first + group_of()] = part;
  }
}

template <bool asynchronous, int stages>
__device__ void integrate(Tile (&tiles)[stages], const float4* __restrict__ x,
                          float4* __restrict__ out, int rows, int groups) {
  float h = 0.0f;
  for (int i = 0; i < stages - 1; ++i) {
    fetch<asynchronous>(tiles[i], x, rows, groups, i * GROUPS);
  }
  for (int i = 0; i * GROUPS < groups; ++i) {
    if constexpr (stages > 1) __pipeline_wait_prior(stages - 2);  // this thread's part of tile i
    __syncthreads();  // tile i has arrived as a whole, and the buffer of tile i - 1 is free
    const int ahead = i + stages - 1;
    fetch<asynchronous>(tiles[ahead % stages], x, rows, groups, ahead * GROUPS);
    if constexpr (stages == 1) {
      if constexpr (asynchronous) __pipeline_wait_prior(0);
      __syncthreads();
    }
    Tile& tile = tiles[i % stages];
    walk(tile, h);
    __syncthreads();
    write(tile, out, rows, groups, i * GROUPS);
  }
}

extern "C" __global__ __launch_bounds__(ROWS, 1) void synchronous(const float4* x, float4* out,
                                                                  int rows, int groups) {
  __shared__ Tile tiles[1];
  integrate<false>(tiles, x, out, rows, groups);
}

extern "C" __global__ __launch_bounds__(ROWS, 1) void one_stage(const float4* x, float4* out,
                                                                int rows, int groups) {
  __shared__ Tile tiles[1];
  integrate<true>(tiles, x, out, rows, groups);
}

extern "C" __global__ __launch_bounds__(ROWS, 1) void two_stages(const float4* x, float4* out,
                                                                 int rows, int groups) {
  __shared__ Tile tiles[2];
  integrate<true>(tiles, x, out, rows, groups);
}

extern "C" __global__ __launch_bounds__(ROWS, 1) void four_stages(const float4* x, float4* out,
                                                                  int rows, int groups) {
  __shared__ Tile tiles[4];
  integrate<true>(tiles, x, out, rows, groups);
}
