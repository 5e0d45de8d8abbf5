// Copy n floats. A thread copies 32 of them in batches of eight loads and eight stores. The kernels
// differ only in which 32 floats a thread copies.
//
// chunked: 32 consecutive elements, so the lanes of a warp are 128 bytes apart.
// coalesced: every 256th element of the block's part, so the lanes of a warp are neighbors.

constexpr unsigned BLOCK = 256, EACH = 32, BATCH = 8;

template <unsigned apart>
__device__ void copy_from(unsigned first, const float* __restrict__ x, float* __restrict__ out,
                          unsigned n) {
  for (unsigned begin = 0; begin < EACH; begin += BATCH) {
    float value[BATCH];
#pragma unroll
    for (unsigned k = 0; k < BATCH; ++k) {  // all loads are issued before the first store
      const unsigned i = first + (begin + k) * apart;
      if (i < n) value[k] = x[i];
    }
#pragma unroll
    for (unsigned k = 0; k < BATCH; ++k) {
      const unsigned i = first + (begin + k) * apart;
      if (i < n) out[i] = value[k];
    }
  }
}

extern "C" __global__ void chunked(const float* x, float* out, unsigned n) {
  copy_from<1>((blockIdx.x * BLOCK + threadIdx.x) * EACH, x, out, n);
}

extern "C" __global__ void coalesced(const float* x, float* out, unsigned n) {
  copy_from<BLOCK>(blockIdx.x * BLOCK * EACH + threadIdx.x, x, out, n);
}
