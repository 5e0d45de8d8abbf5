// out[i] = the squared distance of vector i to the nearest of `codes` codewords. Vectors and
// codewords have 4 floats. The caller chooses blockDim.x. A block has 4 * blockDim.x vectors, and
// the number of vectors is a multiple of 4 * blockDim.x.
//
// whole_codebook: a block compares its vectors with every codeword.
// part_of_codebook: the blocks with the same blockIdx.x compare the same vectors, each with its own
//     part of the codewords, and combine their results with an atomic minimum of `out`.

constexpr unsigned EACH = 4;     // vectors per thread, so each loaded codeword is used four times
constexpr unsigned CHUNK = 512;  // codewords in shared memory at a time

__device__ float distance(float4 a, float4 b) {
  const float x = a.x - b.x, y = a.y - b.y, z = a.z - b.z, w = a.w - b.w;
  return x * x + y * y + z * z + w * w;
}

// Set best[k] to the distance of the thread's vector k to the nearest codeword of [begin, end).
__device__ void nearest(const float4* vectors, const float4* codebook, unsigned begin, unsigned end,
                        float (&best)[EACH]) {
  __shared__ float4 chunk[CHUNK];
  float4 mine[EACH];
#pragma unroll
  for (unsigned k = 0; k < EACH; ++k) {
    mine[k] = vectors[k * blockDim.x];
    best[k] = __int_as_float(0x7f800000);  // infinity
  }
  for (; begin < end; begin += CHUNK) {
    const unsigned count = min(CHUNK, end - begin);
    for (unsigned j = threadIdx.x; j < count; j += blockDim.x) chunk[j] = codebook[begin + j];
    __syncthreads();
#pragma unroll 4
    for (unsigned j = 0; j < count; ++j) {
      const float4 code = chunk[j];
#pragma unroll
      for (unsigned k = 0; k < EACH; ++k) best[k] = fminf(best[k], distance(mine[k], code));
    }
    __syncthreads();
  }
}

// Return the index of the thread's first vector. The other vectors of the thread follow with a
// stride of blockDim.x.
__device__ unsigned first() { return blockIdx.x * EACH * blockDim.x + threadIdx.x; }

extern "C" __global__ void __launch_bounds__(256)
    whole_codebook(const float4* __restrict__ vectors, const float4* __restrict__ codebook,
                   float* __restrict__ out, unsigned codes) {
  float best[EACH];
  nearest(vectors + first(), codebook, 0, codes, best);
#pragma unroll
  for (unsigned k = 0; k < EACH; ++k) out[first() + k * blockDim.x] = best[k];
}

extern "C" __global__ void __launch_bounds__(256)
    part_of_codebook(const float4* __restrict__ vectors, const float4* __restrict__ codebook,
                     int* __restrict__ out, unsigned codes) {
  const unsigned part = (codes + gridDim.y - 1) / gridDim.y;
  const unsigned begin = min(codes, blockIdx.y * part), end = min(codes, begin + part);
  float best[EACH];
  nearest(vectors + first(), codebook, begin, end, best);
  // Nonnegative floats have the same order as their bits, read as integers.
#pragma unroll
  for (unsigned k = 0; k < EACH; ++k) {
    atomicMin(out + first() + k * blockDim.x, __float_as_int(best[k]));
  }
}
