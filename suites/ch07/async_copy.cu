// h = relu(0.75 h + x) along each row, every h written: a recurrence, so a thread a row.
//
// synchronous: tiles of 64 rows and 32 steps, loaded into registers and stored to shared memory.
// one_stage: the same tile by `cp.async`, from global to shared memory past the registers.
// two_stages: the next tile is on its way while a block walks through this one.
// four_stages: the next three tiles are on their way.
//
// Rows begin at multiples of 16 bytes: `groups` of 4 steps.

#include <cuda_pipeline.h>

constexpr int ROWS = 64;   // a block, and its threads; a block an SM, so registers abound
constexpr int GROUPS = 8;  // of a row in a tile: 128 bytes

// One more group a row: the 8 lanes that read 16 bytes each of 8 rows meet in no bank.
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

// Neighbouring threads move neighbouring groups, 8 threads the 128 bytes of a row; a thread moves a
// group of every 8th row. Beyond the last row it is read again, and not written.
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
    if constexpr (!asynchronous) {  // every load is issued before the first store waits for one
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) tile.at[row_of(i)][group_of()] = part[i];
    }
  }
  if constexpr (asynchronous) __pipeline_commit();  // empty beyond the last tile, and counted
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
    if constexpr (stages > 1) __pipeline_wait_prior(stages - 2);  // tile i is here
    __syncthreads();  // for everybody; and tile i - 1 is written, so its place is free
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
