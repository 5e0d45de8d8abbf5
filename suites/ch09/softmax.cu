// Softmax of fp32 rows.
//
// clustered: the blocks of a cluster share a row. A thread keeps its first elements in registers
//   and the others in shared memory. So the row is read once, and each element needs one
//   exponential.
//
// Rows begin at multiples of 16 bytes, which are 4 elements.

#include <math_constants.h>

#include "cluster_rows.cuh"

constexpr unsigned HELD = 8;  // vectors that a thread keeps in registers

__device__ float most_of(float4 v) { return fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)); }

__device__ float raised(float x, float most) { return exp2f(fmaf(x, LOG2E, -most)); }

// Replaces each x by exp2(x * LOG2E - most) and returns the sum of the results.
__device__ float raise(float4& v, float most) {
  v = {raised(v.x, most), raised(v.y, most), raised(v.z, most), raised(v.w, most)};
  return (v.x + v.y) + (v.z + v.w);
}

__device__ float4 scaled(float4 v, float factor) {
  return {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
}

extern "C" __global__ void __launch_bounds__(BLOCK, 3)
    clustered(const float4* __restrict__ x, float4* __restrict__ out, unsigned n) {
  extern __shared__ float4 kept[];
  const auto cluster = cooperative_groups::this_cluster();
  const Slice part = slice(n / 4);
  const unsigned rest = part.count - min(part.count, HELD * BLOCK);
  x += part.first;
  out += part.first;
  const float none = -CUDART_INF_F;
  float4 held[HELD];
#pragma unroll
  for (unsigned k = 0; k < HELD; ++k) {
    const unsigned i = threadIdx.x + k * BLOCK;
    held[k] = i < part.count ? x[i] : float4{none, none, none, none};
  }
  copy_to_shared(kept, x + HELD * BLOCK, rest);
  __pipeline_wait_prior(0);

  // Each exponential is relative to the thread's own largest element.
  Exponentials own = NO_NUMBERS;
#pragma unroll
  for (unsigned k = 0; k < HELD; ++k) own.most = fmaxf(own.most, LOG2E * most_of(held[k]));
  for (unsigned i = threadIdx.x; i < rest; i += BLOCK) {
    own.most = fmaxf(own.most, LOG2E * most_of(kept[i]));
  }
#pragma unroll
  for (unsigned k = 0; k < HELD; ++k) own.total += raise(held[k], own.most);
  for (unsigned i = threadIdx.x; i < rest; i += BLOCK) own.total += raise(kept[i], own.most);

  const Exponentials row = over_cluster(cluster, over_block(own));
  const float factor = exp2f(own.most - row.most) / row.total;
#pragma unroll
  for (unsigned k = 0; k < HELD; ++k) {
    const unsigned i = threadIdx.x + k * BLOCK;
    if (i < part.count) out[i] = scaled(held[k], factor);
  }
  out += HELD * BLOCK;
  for (unsigned i = threadIdx.x; i < rest; i += BLOCK) out[i] = scaled(kept[i], factor);
  cluster.barrier_wait();
}
