// Copies n floats with accesses of 4, 8 or 16 bytes. A thread's accesses are BLOCK vectors apart.
//
// scalar: one 4-byte access per thread.
// unrolled: four 4-byte accesses per thread, 16 bytes in flight.
// pairs: two 8-byte accesses per thread, 16 bytes in flight.
// quads: one 16-byte access per thread.
// quads_unrolled: four 16-byte accesses per thread, 64 bytes in flight.

constexpr unsigned BLOCK = 256;

template <unsigned each, typename Vector>
__device__ void copy(const Vector* __restrict__ x, Vector* __restrict__ out, unsigned n) {
  constexpr unsigned width = sizeof(Vector) / sizeof(float);
  const unsigned count = n / width;  // whole vectors
  const unsigned first = blockIdx.x * (BLOCK * each) + threadIdx.x;
  if (first + (each - 1) * BLOCK < count) {  // one test, so all loads come before the stores
    Vector value[each];
#pragma unroll
    for (unsigned k = 0; k < each; ++k) value[k] = x[first + k * BLOCK];
#pragma unroll
    for (unsigned k = 0; k < each; ++k) out[first + k * BLOCK] = value[k];
  } else {
#pragma unroll 1
    for (unsigned i = first; i < count; i += BLOCK) out[i] = x[i];
  }
  if constexpr (width > 1) {
    const unsigned last = count * width + threadIdx.x;
    if (blockIdx.x == 0 && last < n) {  // up to three elements that do not fill a vector
      reinterpret_cast<float*>(out)[last] = reinterpret_cast<const float*>(x)[last];
    }
  }
}

extern "C" __global__ void scalar(const float* x, float* out, unsigned n) { copy<1>(x, out, n); }

extern "C" __global__ void unrolled(const float* x, float* out, unsigned n) { copy<4>(x, out, n); }

extern "C" __global__ void pairs(const float2* x, float2* out, unsigned n) { copy<2>(x, out, n); }

extern "C" __global__ void quads(const float4* x, float4* out, unsigned n) { copy<1>(x, out, n); }

extern "C" __global__ void quads_unrolled(const float4* x, float4* out, unsigned n) {
  copy<4>(x, out, n);
}
