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

// Copies `count` vectors to shared memory. A thread issues all its copies before it waits for them.
// No barrier follows, because a thread reads only what it has copied itself.
__device__ inline void keep(uint4* kept, const uint4* from, unsigned count) {
  for (unsigned i = threadIdx.x; i < count; i += BLOCK) {
    __pipeline_memcpy_async(&kept[i], &from[i], sizeof(uint4));
  }
  __pipeline_commit();
  __pipeline_wait_prior(0);
}

// Returns the sum over `width` neighboring lanes, with the same bits in each of them.
__device__ inline float over_lanes(float value, unsigned width) {
  for (unsigned half = width / 2; half > 0; half /= 2) {
    value += __shfl_xor_sync(~0u, value, half);
  }
  return value;
}

// Returns the block's sum to every thread of its first warp.
__device__ inline float over_block(float value) {
  __shared__ float part[WARPS];
  value = over_lanes(value, 32);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
  __syncthreads();
  return threadIdx.x < 32 ? over_lanes(part[threadIdx.x % WARPS], WARPS) : 0.0f;
}

// Returns the sum over the cluster of the `sum` of each block's first thread. A block must not exit
// before `cluster.barrier_wait()`, because other blocks read its shared memory until then.
__device__ inline float over_cluster(cooperative_groups::cluster_group cluster, float sum) {
  __shared__ float mine;
  if (threadIdx.x == 0) mine = sum;
  cluster.sync();
  const unsigned blocks = gridDim.x;
  sum = over_lanes(*cluster.map_shared_rank(&mine, threadIdx.x % blocks), blocks);
  cluster.barrier_arrive();
  return sum;
}
