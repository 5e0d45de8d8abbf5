// Helpers for kernels in which the blocks of a cluster share a row. Each block keeps a slice of the
// row in shared memory.
//
// The grid is (blocks of a cluster, rows). The number of blocks is a power of two. A vector is 16
// bytes.

#include <cooperative_groups.h>
#include <cuda_pipeline.h>

constexpr unsigned BLOCK = 256, WARPS = BLOCK / 32;

// A block's part of its row, in vectors. The last blocks of a short row may have no vectors.
struct Slice {
  unsigned begin, count;
  size_t first;  // like `begin`, but counted from the start of the first row
};

__device__ inline Slice slice(unsigned vectors) {
  const unsigned each = (vectors + gridDim.x - 1) / gridDim.x;
  const unsigned begin = min(blockIdx.x * each, vectors);
  return {begin, min(each, vectors - begin), static_cast<size_t>(blockIdx.y) * vectors + begin};
}

// Issues all of this thread's copies of `count` vectors to shared memory. The thread must call
// `__pipeline_wait_prior(0)` before it reads them. No barrier is needed, because a thread reads
// only what it has copied itself.
template <typename Vector>
__device__ void copy_to_shared(Vector* to, const Vector* from, unsigned count) {
  for (unsigned i = threadIdx.x; i < count; i += BLOCK) {
    __pipeline_memcpy_async(&to[i], &from[i], sizeof(Vector));
  }
  __pipeline_commit();
}

// Returns the sum over `width` neighboring lanes, with the same bits in every lane.
__device__ inline float over_lanes(float value, unsigned width) {
  for (unsigned half = width / 2; half > 0; half /= 2) {
    value += __shfl_xor_sync(~0u, value, half);
  }
  return value;
}

// exp(x - most) is exp2(x * LOG2E - most * LOG2E), which takes one multiply-add and one SFU
// instruction.
constexpr float LOG2E = 1.44269504f;

// For a set of numbers: `most` is the largest number times LOG2E, and `total` is the sum of
//   exp2(number * LOG2E - most).
struct alignas(8) Exponentials {
  float most, total;
};

// The value for an empty set is not -inf, because -inf - -inf is NaN.
constexpr float LOWEST = -1e38f;
constexpr Exponentials NO_NUMBERS{LOWEST, 0.0f};

__device__ inline Exponentials over_lanes(Exponentials own, unsigned width) {
  float most = own.most;
  for (unsigned half = width / 2; half > 0; half /= 2) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, half));
  }
  return {most, over_lanes(own.total * exp2f(own.most - most), width)};
}

// Reduces `value` over the block as `over_lanes` does, and returns the result to every thread of
// the first warp.
template <typename Value>
__device__ Value over_block(Value value) {
  __shared__ Value part[WARPS];
  value = over_lanes(value, 32);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
  __syncthreads();
  return threadIdx.x < 32 ? over_lanes(part[threadIdx.x % WARPS], WARPS) : value;
}

// Reduces the `value` of each block's first thread over the cluster, as `over_lanes` does, and
// returns the result to every thread. A block must call `cluster.barrier_wait()` before it exits,
// because until then other blocks read its shared memory.
template <typename Value>
__device__ Value over_cluster(cooperative_groups::cluster_group cluster, Value value) {
  __shared__ Value mine;
  if (threadIdx.x == 0) mine = value;
  cluster.sync();
  const unsigned blocks = gridDim.x;
  value = over_lanes(*cluster.map_shared_rank(&mine, threadIdx.x % blocks), blocks);
  cluster.barrier_arrive();
  return value;
}
