// out[i] = a * x[i] + y[i] for n floats, one thread per element, in blocks of any size.
//
// axpy: needs few registers and no shared memory, so only the block size decides how many threads
// an SM holds.
extern "C" __global__ void axpy(float a, const float* __restrict__ x, const float* __restrict__ y,
                                float* __restrict__ out, unsigned n) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = a * x[i] + y[i];
}
