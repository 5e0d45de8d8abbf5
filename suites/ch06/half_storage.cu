// out[i] = silu(x[i]) = x[i] / (1 + exp(-x[i])), computed in fp32.
//
// in_fp32: x and out are fp32.
// in_registers: x and out are bf16, and each thread converts one element in its registers.
// pairs: like in_registers, with two elements per thread in one 4-byte access.
// octets: like in_registers, with eight elements per thread in one 16-byte access.

#include <cuda_bf16.h>

constexpr unsigned BLOCK = 256;

__device__ float silu(float x) { return __fdividef(x, 1.0f + expf(-x)); }

// The value is rounded to bf16 once, when it is stored.
__device__ __nv_bfloat162 silu(__nv_bfloat162 x) {
  const float2 value = __bfloat1622float2(x);
  return __floats2bfloat162_rn(silu(value.x), silu(value.y));
}

__device__ unsigned place() { return blockIdx.x * BLOCK + threadIdx.x; }

// Handle the last elements, which are too few for a vector of `width` elements.
template <unsigned width>
__device__ void leftovers(const __nv_bfloat16* x, __nv_bfloat16* out, unsigned n) {
  const unsigned i = n / width * width + threadIdx.x;
  if (blockIdx.x == 0 && i < n) out[i] = __float2bfloat16(silu(__bfloat162float(x[i])));
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    in_fp32(const float* __restrict__ x, float* __restrict__ out, unsigned n) {
  const unsigned i = place();
  if (i < n) out[i] = silu(x[i]);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    in_registers(const __nv_bfloat16* __restrict__ x, __nv_bfloat16* __restrict__ out,
                 unsigned n) {
  const unsigned i = place();
  if (i < n) out[i] = __float2bfloat16(silu(__bfloat162float(x[i])));
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    pairs(const __nv_bfloat16* __restrict__ x, __nv_bfloat16* __restrict__ out, unsigned n) {
  const unsigned i = place();
  if (i < n / 2) {
    const __nv_bfloat162 pair = reinterpret_cast<const __nv_bfloat162*>(x)[i];
    reinterpret_cast<__nv_bfloat162*>(out)[i] = silu(pair);
  }
  leftovers<2>(x, out, n);
}

// One instruction loads or stores a uint4, whose 16 bytes hold four pairs of bf16 elements.
extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    octets(const __nv_bfloat16* __restrict__ x, __nv_bfloat16* __restrict__ out, unsigned n) {
  const unsigned i = place();
  if (i < n / 8) {
    uint4 octet = reinterpret_cast<const uint4*>(x)[i];
    __nv_bfloat162* pair = reinterpret_cast<__nv_bfloat162*>(&octet);
#pragma unroll
    for (unsigned k = 0; k < 4; ++k) pair[k] = silu(pair[k]);
    reinterpret_cast<uint4*>(out)[i] = octet;
  }
  leftovers<8>(x, out, n);
}
