// Kernels with one thread per element, and the same kernels with a grid-stride loop.
//
// scale_each: out[i] = a * x[i], one thread per element.
// scale_stride: the same with a fixed number of blocks, whose threads loop over the elements.
// decode_each: out[i] = table[codes[i]], one thread per element. Each block first copies the table
//     of 256 floats into shared memory.
// decode_code_first: like decode_each, but threads load their code before they wait for the table.
// decode_stride: like decode_each, but a fixed number of blocks each copy the table once.
// decode_through_l1: like decode_each without the copy. The table is read through the L1.

constexpr unsigned BLOCK = 256, ENTRIES = 256;
static_assert(ENTRIES == BLOCK, "each thread copies one entry of the table");

// one_each and grid_stride call `body` for each element of this thread. The loop is not unrolled,
// so a thread has one load in flight, as in the kernels with one thread per element.
template <typename Body>
__device__ void one_each(unsigned n, Body body) {
  const unsigned i = blockIdx.x * BLOCK + threadIdx.x;
  if (i < n) body(i);
}

template <typename Body>
__device__ void grid_stride(unsigned n, Body body) {
#pragma unroll 1
  for (unsigned i = blockIdx.x * BLOCK + threadIdx.x; i < n; i += gridDim.x * BLOCK) body(i);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    scale_each(float a, const float* __restrict__ x, float* __restrict__ out, unsigned n) {
  one_each(n, [=](unsigned i) { out[i] = a * x[i]; });
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    scale_stride(float a, const float* __restrict__ x, float* __restrict__ out, unsigned n) {
  grid_stride(n, [=](unsigned i) { out[i] = a * x[i]; });
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    decode_each(const float* __restrict__ table, const int* __restrict__ codes,
                float* __restrict__ out, unsigned n) {
  __shared__ float copy[ENTRIES];
  copy[threadIdx.x] = table[threadIdx.x];
  __syncthreads();
  one_each(n, [&](unsigned i) { out[i] = copy[codes[i]]; });
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    decode_code_first(const float* __restrict__ table, const int* __restrict__ codes,
                      float* __restrict__ out, unsigned n) {
  __shared__ float copy[ENTRIES];
  const unsigned i = blockIdx.x * BLOCK + threadIdx.x;
  const int code = i < n ? codes[i] : 0;
  copy[threadIdx.x] = table[threadIdx.x];
  __syncthreads();
  if (i < n) out[i] = copy[code];
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    decode_stride(const float* __restrict__ table, const int* __restrict__ codes,
                  float* __restrict__ out, unsigned n) {
  __shared__ float copy[ENTRIES];
  copy[threadIdx.x] = table[threadIdx.x];
  __syncthreads();
  grid_stride(n, [&](unsigned i) { out[i] = copy[codes[i]]; });
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    decode_through_l1(const float* __restrict__ table, const int* __restrict__ codes,
                      float* __restrict__ out, unsigned n) {
  one_each(n, [=](unsigned i) { out[i] = table[codes[i]]; });
}
