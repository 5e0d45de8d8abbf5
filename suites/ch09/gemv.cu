// Products of a matrix w (n, k) and a few vectors x (m, k) in bf16, with fp32 sums. out is (m, n).
// Each warp processes one row of w.
//
// scalar: for one vector. A lane loads one element of 2 bytes at a time.
// vectorized: for one vector. A lane loads 8 elements (16 bytes) at a time. k is a multiple of 8.
// together_2, together_4, together_8, together_16: vectorized for 2 to 16 vectors. Each element of
//     w is loaded once and multiplied with every vector.

#include <cuda_bf16.h>

constexpr unsigned WARPS = 8;
constexpr unsigned ALL = 0xffffffffu;

__device__ float summed_over_lanes(float total) {
#pragma unroll
  for (unsigned lane = 16; lane > 0; lane /= 2) total += __shfl_xor_sync(ALL, total, lane);
  return total;
}

// Eight neighboring elements, loaded in one access.
struct Octet {
  uint4 bits;
  __device__ float2 pair(unsigned i) const {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(&bits)[i]);
  }
};

template <unsigned m>
__device__ void rows_times(const __nv_bfloat16* __restrict__ w, const __nv_bfloat16* __restrict__ x,
                           __nv_bfloat16* __restrict__ out, unsigned n, unsigned k) {
  const unsigned row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= n) return;  // the whole warp
  const uint4* weights = reinterpret_cast<const uint4*>(w + size_t(row) * k);
  const uint4* vectors = reinterpret_cast<const uint4*>(x);
  const unsigned octets = k / 8;
  float total[m] = {};
  // Many vectors need many registers, so the loop is unrolled further only for one vector.
#pragma unroll(m == 1 ? 4 : 1)
  for (unsigned i = lane; i < octets; i += 32) {
    const Octet a = {weights[i]};
#pragma unroll
    for (unsigned j = 0; j < m; ++j) {
      const Octet b = {vectors[j * octets + i]};
#pragma unroll
      for (unsigned p = 0; p < 4; ++p) {
        const float2 left = a.pair(p), right = b.pair(p);
        total[j] = fmaf(left.x, right.x, total[j]);
        total[j] = fmaf(left.y, right.y, total[j]);
      }
    }
  }
#pragma unroll
  for (unsigned j = 0; j < m; ++j) {
    const float sum = summed_over_lanes(total[j]);
    if (lane == 0) out[size_t(j) * n + row] = __float2bfloat16(sum);
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    scalar(const __nv_bfloat16* __restrict__ w, const __nv_bfloat16* __restrict__ x,
           __nv_bfloat16* __restrict__ out, unsigned n, unsigned k) {
  const unsigned row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= n) return;  // the whole warp
  float total = 0.0f;
#pragma unroll 4
  for (unsigned i = lane; i < k; i += 32)
    total = fmaf(__bfloat162float(w[size_t(row) * k + i]), __bfloat162float(x[i]), total);
  total = summed_over_lanes(total);
  if (lane == 0) out[row] = __float2bfloat16(total);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    vectorized(const __nv_bfloat16* __restrict__ w, const __nv_bfloat16* __restrict__ x,
               __nv_bfloat16* __restrict__ out, unsigned n, unsigned k) {
  rows_times<1>(w, x, out, n, k);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    together_2(const __nv_bfloat16* __restrict__ w, const __nv_bfloat16* __restrict__ x,
               __nv_bfloat16* __restrict__ out, unsigned n, unsigned k) {
  rows_times<2>(w, x, out, n, k);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    together_4(const __nv_bfloat16* __restrict__ w, const __nv_bfloat16* __restrict__ x,
               __nv_bfloat16* __restrict__ out, unsigned n, unsigned k) {
  rows_times<4>(w, x, out, n, k);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    together_8(const __nv_bfloat16* __restrict__ w, const __nv_bfloat16* __restrict__ x,
               __nv_bfloat16* __restrict__ out, unsigned n, unsigned k) {
  rows_times<8>(w, x, out, n, k);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    together_16(const __nv_bfloat16* __restrict__ w, const __nv_bfloat16* __restrict__ x,
                __nv_bfloat16* __restrict__ out, unsigned n, unsigned k) {
  rows_times<16>(w, x, out, n, k);
}
