// relu(a * b + c) on n floats: the same arithmetic, with the data moved in five ways.
//
// multiply, add, relu: one step per kernel, one element per thread.
// multiply_unrolled, add_unrolled, relu_unrolled: one step, four elements per thread, with a stride
// of the whole grid.
// multiply_vectorized, add_vectorized, relu_vectorized: one step, four neighbors per thread.
// fused: all three steps on one element per thread, with intermediate results in registers.
// fused_vectorized: all three steps, four neighbors per thread.

__device__ float product(float a, float b) { return a * b; }
__device__ float sum(float a, float b) { return a + b; }
// NaN stays NaN, as in torch. fmaxf would turn NaN into 0, and a check could then miss elements
// that were never written.
__device__ float positive(float x) { return x < 0.0f ? 0.0f : x; }
__device__ float all_three(float a, float b, float c) { return positive(sum(product(a, b), c)); }

__device__ unsigned thread() { return blockIdx.x * blockDim.x + threadIdx.x; }

template <auto step, typename... In>
__device__ void one_each(unsigned n, float* __restrict__ out, const In* __restrict__... in) {
  const unsigned i = thread();
  if (i < n) out[i] = step(in[i]...);
}

template <auto step, typename... In>
__device__ void four_apart(unsigned n, float* __restrict__ out, const In* __restrict__... in) {
  const unsigned first = thread(), stride = gridDim.x * blockDim.x;
  float result[4];
#pragma unroll
  for (unsigned k = 0; k < 4; ++k) {  // all loads are issued before the first store
    const unsigned i = first + k * stride;
    if (i < n) result[k] = step(in[i]...);
  }
#pragma unroll
  for (unsigned k = 0; k < 4; ++k) {
    const unsigned i = first + k * stride;
    if (i < n) out[i] = result[k];
  }
}

template <auto step, typename... In>
__device__ void four_neighbours(unsigned n, float4* __restrict__ out,
                                const In* __restrict__... in) {
  const unsigned i = thread(), last = n / 4 * 4 + i;
  if (i < n / 4) {
    out[i] = {step(in[i].x...), step(in[i].y...), step(in[i].z...), step(in[i].w...)};
  }
  if (last < n) {  // at most three elements, which do not fill a float4
    reinterpret_cast<float*>(out)[last] = step(reinterpret_cast<const float*>(in)[last]...);
  }
}

extern "C" __global__ void multiply(const float* a, const float* b, float* out, unsigned n) {
  one_each<product>(n, out, a, b);
}

extern "C" __global__ void add(const float* a, const float* b, float* out, unsigned n) {
  one_each<sum>(n, out, a, b);
}

extern "C" __global__ void relu(const float* x, float* out, unsigned n) {
  one_each<positive>(n, out, x);
}

extern "C" __global__ void multiply_unrolled(const float* a, const float* b, float* out,
                                             unsigned n) {
  four_apart<product>(n, out, a, b);
}

extern "C" __global__ void add_unrolled(const float* a, const float* b, float* out, unsigned n) {
  four_apart<sum>(n, out, a, b);
}

extern "C" __global__ void relu_unrolled(const float* x, float* out, unsigned n) {
  four_apart<positive>(n, out, x);
}

extern "C" __global__ void multiply_vectorized(const float4* a, const float4* b, float4* out,
                                               unsigned n) {
  four_neighbours<product>(n, out, a, b);
}

extern "C" __global__ void add_vectorized(const float4* a, const float4* b, float4* out,
                                          unsigned n) {
  four_neighbours<sum>(n, out, a, b);
}

extern "C" __global__ void relu_vectorized(const float4* x, float4* out, unsigned n) {
  four_neighbours<positive>(n, out, x);
}

extern "C" __global__ void fused(const float* a, const float* b, const float* c, float* out,
                                 unsigned n) {
  one_each<all_three>(n, out, a, b, c);
}

extern "C" __global__ void fused_vectorized(const float4* a, const float4* b, const float4* c,
                                            float4* out, unsigned n) {
  four_neighbours<all_three>(n, out, a, b, c);
}
