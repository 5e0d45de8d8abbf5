// Multiplies a matrix of n rows and k columns with one vector. x and y are bf16, and sums are fp32.
// A warp computes four rows, so it loads and converts each part of x once for all four.
//
// gemv_bf16: weights of 16 bits.
// gemv_int8: weights of 8 bits, stored with 128 added, and one scale per row.
// gemv_int4: weights of 4 bits, stored with 8 added, and one scale per 128 weights of a row.

#include <cuda_bf16.h>

constexpr unsigned WARPS = 8, ROWS = 4, GROUP = 128;

// Converts eight bf16 numbers to fp32. bf16 is the upper half of fp32.
__device__ void from_bf16(const uint4& packed, float* out) {
  const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = __uint_as_float(words[i] << 16);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

// Converts four bytes to fp32. The fp32 number 0x4b0000uu, with a byte u at the end, is 2^23 + u.
__device__ void from_bytes(unsigned word, float* out) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[i] = __uint_as_float(((word >> (8 * i)) & 0xffu) | 0x4b000000u) - (8388608.0f + 128.0f);
  }
}

// Converts eight 4-bit weights to fp32, each with 136 added. The bf16 number 0x430u, with four bits
// u at the end, is 128 + u, and u is the weight + 8. The lower 16 bits of a word hold weights 0, 2,
// 4 and 6.
__device__ void from_halves(unsigned word, float* out) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned pair = ((word >> (4 * i)) & 0x000f000fu) | 0x43004300u;
    out[2 * i] = __uint_as_float(pair << 16);
    out[2 * i + 1] = __uint_as_float(pair & 0xffff0000u);
  }
}

template <int BITS>
__device__ void convert(const uint4& packed, float* out) {
  if constexpr (BITS == 16) {
    from_bf16(packed, out);
  } else {
    const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (BITS == 8) from_bytes(words[i], out + 4 * i);
      if constexpr (BITS == 4) from_halves(words[i], out + 8 * i);
    }
  }
}

template <int BITS>
__device__ void gemv(const uint4* __restrict__ w, const float* __restrict__ scales,
                     const uint4* __restrict__ x, __nv_bfloat16* __restrict__ y, unsigned n,
                     unsigned k) {
  constexpr unsigned EACH = 128 / BITS;  // weights of one load of 16 bytes
  const unsigned lane = threadIdx.x % 32, loads = k / EACH;
  const unsigned first = (blockIdx.x * WARPS + threadIdx.x / 32) * ROWS;
  float total[ROWS] = {};
  for (unsigned c = lane; c < loads; c += 32) {
    uint4 packed[ROWS];
#pragma unroll
    for (unsigned r = 0; r < ROWS; ++r) {
      const unsigned row = min(first + r, n - 1);  // rows after the last are not stored
      packed[r] = __ldcs(w + size_t(row) * loads + c);
    }
    float values[EACH], sum = 0.0f;
#pragma unroll
    for (unsigned j = 0; j < EACH / 8; ++j) from_bf16(x[c * (EACH / 8) + j], values + 8 * j);
#pragma unroll
    for (unsigned j = 0; j < EACH; ++j) sum += values[j];
#pragma unroll
    for (unsigned r = 0; r < ROWS; ++r) {
      float weights[EACH], product = 0.0f;
      convert<BITS>(packed[r], weights);
#pragma unroll
      for (unsigned j = 0; j < EACH; ++j) product += weights[j] * values[j];
      if constexpr (BITS == 4) {
        const unsigned row = min(first + r, n - 1);
        const float scale = scales[size_t(row) * (k / GROUP) + c * EACH / GROUP];
        product = scale * (product - 136.0f * sum);
      }
      total[r] += product;
    }
  }
#pragma unroll
  for (unsigned r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) total[r] += __shfl_xor_sync(~0u, total[r], step);
    if (lane == 0 && first + r < n) {
      y[first + r] = __float2bfloat16(BITS == 8 ? total[r] * scales[first + r] : total[r]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    gemv_bf16(const uint4* w, const uint4* x, __nv_bfloat16* y, unsigned n, unsigned k) {
  gemv<16>(w, nullptr, x, y, n, k);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    gemv_int8(const uint4* w, const float* scales, const uint4* x, __nv_bfloat16* y, unsigned n,
              unsigned k) {
  gemv<8>(w, scales, x, y, n, k);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    gemv_int4(const uint4* w, const float* scales, const uint4* x, __nv_bfloat16* y, unsigned n,
              unsigned k) {
  gemv<4>(w, scales, x, y, n, k);
}
