// RMS norm of fp16 rows: x divided by the root of its row's mean square, times the weight.
//
// clustered: the blocks of a cluster share a row and keep it in their shared memory, so the row is
//   read from DRAM once. The blocks read each other's sums from shared memory.
// ring: a cluster processes many rows, while bulk copies load the next rows. So a block loads its
//   part of the weight only once. The blocks wait at the cluster's barrier once per row.
// pushed: like ring, but the blocks send their sums to each other, and wait only for these sums.
//
// Rows begin at multiples of 16 bytes, which are 8 elements.

#include <cuda_fp16.h>

#include "row_ring.cuh"

constexpr unsigned AHEAD = 4;  // vectors of the weight that a thread loads before it uses the first

// 8 elements, as pairs of 4 bytes.
union Vector {
  uint4 bytes;
  __half2 pair[4];
};

__device__ float squares(uint4 bytes) {
  const Vector x{bytes};
  float sum = 0.0f;
#pragma unroll
  for (const __half2 pair : x.pair) {
    const float2 value = __half22float2(pair);
    sum += value.x * value.x + value.y * value.y;
  }
  return sum;
}

__device__ uint4 scaled(uint4 bytes, uint4 weights, float scale) {
  Vector x{bytes};
  const Vector weight{weights};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 value = __half22float2(x.pair[i]), by = __half22float2(weight.pair[i]);
    x.pair[i] = __floats2half2_rn(value.x * scale * by.x, value.y * scale * by.y);
  }
  return x.bytes;
}

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
    clustered(const uint4* __restrict__ x, const uint4* __restrict__ weight,
              uint4* __restrict__ out, unsigned n, float eps) {
  extern __shared__ uint4 kept[];
  const auto cluster = cooperative_groups::this_cluster();
  const Slice part = slice(n / 8);
  copy_to_shared(kept, x + part.first, part.count);
  __pipeline_wait_prior(0);
  float sum = 0.0f;
  for (unsigned i = threadIdx.x; i < part.count; i += BLOCK) sum += squares(kept[i]);
  sum = over_cluster(cluster, over_block(sum));

  const float scale = rsqrtf(sum / static_cast<float>(n) + eps);
  weight += part.begin;
  out += part.first;
  unsigned i = threadIdx.x;
  for (; i + (AHEAD - 1) * BLOCK < part.count; i += AHEAD * BLOCK) {
    uint4 weights[AHEAD];
#pragma unroll
    for (unsigned k = 0; k < AHEAD; ++k) weights[k] = weight[i + k * BLOCK];
#pragma unroll
    for (unsigned k = 0; k < AHEAD; ++k) {
      out[i + k * BLOCK] = scaled(kept[i + k * BLOCK], weights[k], scale);
    }
  }
  for (; i < part.count; i += BLOCK) out[i] = scaled(kept[i], weight[i], scale);
  cluster.barrier_wait();
}

// The persistent clusters
// --------------------------------------------------------------------------

constexpr unsigned THREADS = 512, PER = 8, STAGES = 3;

template <bool PUSHED>
__device__ void take_rows(const uint4* x, const uint4* weight, uint4* out, unsigned n,
                          unsigned rows, float eps) {
  using Rows = Ring<float, THREADS, PER, STAGES>;
  extern __shared__ uint4 stages[];
  __shared__ Rows::Shared shared;
  const Rows ring(shared, stages, x, n / 8, rows);
  uint4 weights[PER];
#pragma unroll
  for (unsigned k = 0; k < PER; ++k) {
    weights[k] = ring.holds(k) ? weight[ring.begin(0) + ring.index(k)] : uint4{};
  }
  for (unsigned turn = 0, row = blockIdx.y; row < rows; ++turn, row += gridDim.y) {
    uint4 v[PER];
    ring.take(v, turn, uint4{});
    float sum = 0.0f;
#pragma unroll
    for (const uint4 bytes : v) sum += squares(bytes);
    sum = ring.over_row<PUSHED>(sum, turn);
    const float scale = rsqrtf(sum / static_cast<float>(n) + eps);
#pragma unroll
    for (unsigned k = 0; k < PER; ++k) {
      if (ring.holds(k)) out[ring.begin(row) + ring.index(k)] = scaled(v[k], weights[k], scale);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    ring(const uint4* __restrict__ x, const uint4* __restrict__ weight, uint4* __restrict__ out,
         unsigned n, unsigned rows, float eps) {
  take_rows<false>(x, weight, out, n, rows, eps);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    pushed(const uint4* __restrict__ x, const uint4* __restrict__ weight, uint4* __restrict__ out,
           unsigned n, unsigned rows, float eps) {
  take_rows<true>(x, weight, out, n, rows, eps);
}
