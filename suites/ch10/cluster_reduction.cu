// Divides x by the root of its row's mean square. 8 blocks share a row, and all of them need the
// row's sum.
//
// add_squares: each block adds the squares of its part of a row to the row's sum with one atomic.
// divide_by_sum: reads x again and divides it, with the sum that the atomics have computed.
// store_squares: each block stores its part of the sum.
// divide_by_parts: reads x again, adds the 8 partial sums of its row, and divides.
// distributed: does both steps in one kernel. A row's 8 blocks are a cluster, and the partial sums
//   stay in its shared memory.
// kept: like distributed, but x also stays in shared memory, so it is read once.
//
// Rows begin at multiples of 16 bytes, which are 4 elements.

#include <cooperative_groups.h>

constexpr unsigned BLOCK = 256, EACH = 4, WARPS = BLOCK / 32, BLOCKS = 8;
constexpr float EPS = 1e-6f;

// A block's part of its row, in float4. The last blocks of a short row may have no elements.
struct Slice {
  size_t first;
  unsigned count;
};

__device__ Slice slice(unsigned n) {
  const unsigned row = n / 4, each = (row + BLOCKS - 1) / BLOCKS;
  const unsigned begin = min(blockIdx.x * each, row);
  return {static_cast<size_t>(blockIdx.y) * row + begin, min(each, row - begin)};
}

// Calls visit(i, from[i]) for each i of this thread. Four loads are issued before the first is
// used.
template <typename Visit>
__device__ void visit_all(const float4* from, unsigned count, Visit visit) {
  unsigned i = threadIdx.x;
  for (; i + (EACH - 1) * BLOCK < count; i += EACH * BLOCK) {
    float4 value[EACH];
#pragma unroll
    for (unsigned k = 0; k < EACH; ++k) value[k] = from[i + k * BLOCK];
#pragma unroll
    for (unsigned k = 0; k < EACH; ++k) visit(i + k * BLOCK, value[k]);
  }
  for (; i < count; i += BLOCK) visit(i, from[i]);
}

__device__ float square(float4 v) { return (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w); }

// Returns the sum over `width` neighboring lanes, with the same bits in every lane.
__device__ float over_lanes(float value, unsigned width) {
  for (unsigned half = width / 2; half > 0; half /= 2) {
    value += __shfl_xor_sync(~0u, value, half);
  }
  return value;
}

// Returns the block's sum to every thread of its first warp.
__device__ float over_block(float value) {
  __shared__ float part[WARPS];
  value = over_lanes(value, 32);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
  __syncthreads();
  return threadIdx.x < 32 ? over_lanes(part[threadIdx.x % WARPS], WARPS) : 0.0f;
}

__device__ float squares(const float4* x, Slice part) {
  float sum = 0.0f;
  visit_all(x + part.first, part.count, [&](unsigned, float4 v) { sum += square(v); });
  return over_block(sum);
}

// Returns the sum of a row's 8 block sums. from(block) returns the sum of one block.
template <typename From>
__device__ float over_row(From from) {
  return over_lanes(from(threadIdx.x % BLOCKS), BLOCKS);
}

__device__ void divide(const float4* from, float4* to, unsigned count, float sum, unsigned n) {
  const float factor = 1.0f / sqrtf(sum / static_cast<float>(n) + EPS);
  visit_all(from, count, [&](unsigned i, float4 v) {
    to[i] = {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
  });
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    add_squares(const float4* __restrict__ x, float* sums, unsigned n) {
  const float sum = squares(x, slice(n));
  if (threadIdx.x == 0) atomicAdd(&sums[blockIdx.y], sum);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    divide_by_sum(const float4* __restrict__ x, const float* __restrict__ sums,
                  float4* __restrict__ out, unsigned n) {
  const Slice part = slice(n);
  divide(x + part.first, out + part.first, part.count, sums[blockIdx.y], n);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    store_squares(const float4* __restrict__ x, float* parts, unsigned n) {
  const float sum = squares(x, slice(n));
  if (threadIdx.x == 0) parts[blockIdx.y * BLOCKS + blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    divide_by_parts(const float4* __restrict__ x, const float* __restrict__ parts,
                    float4* __restrict__ out, unsigned n) {
  const Slice part = slice(n);
  const float* row = parts + blockIdx.y * BLOCKS;
  const float sum = over_row([&](unsigned block) { return row[block]; });
  divide(x + part.first, out + part.first, part.count, sum, n);
}

// Adds the `sum` of each block's first thread over the cluster and returns the result. A block must
// call `cluster.barrier_wait()` before it exits, because until then other blocks read its shared
// memory.
__device__ float over_cluster(cooperative_groups::cluster_group cluster, float sum) {
  __shared__ float mine;
  if (threadIdx.x == 0) mine = sum;
  cluster.sync();
  sum = over_row([&](unsigned block) { return *cluster.map_shared_rank(&mine, block); });
  cluster.barrier_arrive();
  return sum;
}

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(BLOCK, 6)
    distributed(const float4* __restrict__ x, float4* __restrict__ out, unsigned n) {
  const auto cluster = cooperative_groups::this_cluster();
  const Slice part = slice(n);
  const float sum = over_cluster(cluster, squares(x, part));
  divide(x + part.first, out + part.first, part.count, sum, n);
  cluster.barrier_wait();
}

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(BLOCK, 6)
    kept(const float4* __restrict__ x, float4* __restrict__ out, unsigned n) {
  extern __shared__ float4 values[];  // each thread reads only what it wrote itself
  const auto cluster = cooperative_groups::this_cluster();
  const Slice part = slice(n);
  float sum = 0.0f;
  visit_all(x + part.first, part.count, [&](unsigned i, float4 v) {
    values[i] = v;
    sum += square(v);
  });
  sum = over_cluster(cluster, over_block(sum));
  divide(values, out + part.first, part.count, sum, n);
  cluster.barrier_wait();
}
