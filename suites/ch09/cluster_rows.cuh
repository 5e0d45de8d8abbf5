// Rows that the blocks of a cluster share: each block keeps a slice of its row in shared memory.
//
// The grid is (blocks of a cluster, rows), and the blocks are a power of two. A vector is 16 bytes.

#include <cooperative_groups.h>
#include <cuda_pipeline.h>

constexpr unsigned BLOCK = 256, WARPS = BLOCK / 32;

// A block's part of its row, in vectors. The last blocks of a short row may have no vectors.
struct Slice {
  unsigned begin, count;
  size_t first;  // `begin` counted from the first row
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

// Returns the sum over `width` neighboring lanes, with the same bits in each of them.
__device__ inline float over_lanes(float value, unsigned width) {
  for (unsigned half = width / 2; half > 0; half /= 2) {
    value += __shfl_xor_sync(~0u, value, half);
  }
  return value;
}

// exp(x) is exp2(x * LOG2E), which is one multiply-add and one instruction of the SFU, even with a
// difference: exp(x - most) is exp2(x * LOG2E - most * LOG2E).
constexpr float LOG2E = 1.44269504f;

// The largest of some numbers, times LOG2E, and the sum of exp2(number * LOG2E - most) over them.
struct alignas(8) Exponentials {
  float most, total;
};

// That of no numbers. Not -inf: -inf - -inf is not a number.
constexpr float LOWEST = -1e38f;
constexpr Exponentials NO_NUMBERS{LOWEST, 0.0f};

__device__ inline Exponentials over_lanes(Exponentials own, unsigned width) {
  float most = own.most;
  for (unsigned half = width / 2; half > 0; half /= 2) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, half));
  }
  return {most, over_lanes(own.total * exp2f(own.most - most), width)};
}

// Returns the result of `over_lanes` over the block to every thread of its first warp.
template <typename Value>
__device__ Value over_block(Value value) {
  __shared__ Value part[WARPS];
  value = over_lanes(value, 32);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
  __syncthreads();
  return threadIdx.x < 32 ? over_lanes(part[threadIdx.x % WARPS], WARPS) : value;
}

// Returns the result of `over_lanes` over the cluster to every thread, from the `value` of each
// block's first thread. A block must not exit before `cluster.barrier_wait()`, because other blocks
// read its shared memory until then.
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
