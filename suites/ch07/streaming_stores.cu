// out[i] = table[index[i]] for rows of 32 floats. 8 threads copy a row, 16 bytes each. A thread has
// 4 rows.
//
// ordinary: plain stores.
// streaming: stores that mark the results as first to evict from the L2.

constexpr unsigned BLOCK = 256, QUADS = 8, EACH = 4, STEP = BLOCK / QUADS;
constexpr unsigned BLOCKS_AN_SM = 8;  // at most 32 registers, so both kernels have equal occupancy

__device__ void store(float4* at, float4 value) { *at = value; }
__device__ void store_streaming(float4* at, float4 value) { __stcs(at, value); }

template <auto store, bool whole>
__device__ void gather_rows(const float4* __restrict__ table, const int* __restrict__ index,
                            float4* __restrict__ out, unsigned n) {
  const unsigned quad = threadIdx.x % QUADS;
  const unsigned first = blockIdx.x * (STEP * EACH) + threadIdx.x / QUADS;
  int row[EACH];
  float4 value[EACH];
#pragma unroll
  for (unsigned k = 0; k < EACH; ++k) {
    if (whole || first + k * STEP < n) row[k] = index[first + k * STEP];
  }
#pragma unroll
  for (unsigned k = 0; k < EACH; ++k) {
    if (whole || first + k * STEP < n) value[k] = table[static_cast<size_t>(row[k]) * QUADS + quad];
  }
#pragma unroll
  for (unsigned k = 0; k < EACH; ++k) {
    const size_t i = first + k * STEP;
    if (whole || i < n) store(out + i * QUADS + quad, value[k]);
  }
}

// If all rows of a block exist, the block tests none of them, so a thread issues its loads without
// a branch.
template <auto store>
__device__ void gather(const float4* __restrict__ table, const int* __restrict__ index,
                       float4* __restrict__ out, unsigned n) {
  if ((blockIdx.x + 1) * (STEP * EACH) <= n) {
    gather_rows<store, true>(table, index, out, n);
  } else {
    gather_rows<store, false>(table, index, out, n);
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS_AN_SM)
    ordinary(const float4* __restrict__ table, const int* __restrict__ index,
             float4* __restrict__ out, unsigned n) {
  gather<store>(table, index, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS_AN_SM)
    streaming(const float4* __restrict__ table, const int* __restrict__ index,
              float4* __restrict__ out, unsigned n) {
  gather<store_streaming>(table, index, out, n);
}
