// out[i] = a * x[i] + y[i] for n floats.
//
// one_thread: a single thread computes the elements one after another.
// one_block: the threads of one block share the elements. Neighboring threads get neighboring
//     elements.
// whole_grid: one thread per element, in as many blocks as the elements need.

// This is a CPU loop, moved to the GPU unchanged and launched with one thread.
extern "C" __global__ void one_thread(float a, const float* x, const float* y, float* out,
                                      unsigned n) {
  for (unsigned i = 0; i < n; ++i) out[i] = a * x[i] + y[i];
}

// threadIdx.x is the number of this thread in the block, and blockDim.x is the number of threads.
// In each iteration, the threads of a warp access 32 neighboring elements, which is one request to
// memory.
extern "C" __global__ void one_block(float a, const float* x, const float* y, float* out,
                                     unsigned n) {
  for (unsigned i = threadIdx.x; i < n; i += blockDim.x) out[i] = a * x[i] + y[i];
}

// blockIdx.x is the number of this block. There is no loop. Some threads of the last block have no
// element.
extern "C" __global__ void whole_grid(float a, const float* x, const float* y, float* out,
                                      unsigned n) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = a * x[i] + y[i];
}
