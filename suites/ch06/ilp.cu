// Elementwise kernels whose threads have one element or four.
//
// single: out[i] = sigmoid(x[i]), one element per thread.
// in_turn: the same, four elements per thread, each finished before the next is loaded.
// two, four, eight: the same, with all loads of a thread before its first store.
// growth_single: 256 steps of logistic growth, one element per thread.
// growth_four: the same, with four elements per thread, whose steps alternate.

constexpr unsigned BLOCK = 256, STEPS = 256;

__device__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

// The compiler must assume that `out` and `x` overlap. So it loads no element before it has stored
// the previous one.
template <unsigned each>
__device__ void one_by_one(const float* x, float* out, unsigned n) {
  const unsigned first = blockIdx.x * (BLOCK * each) + threadIdx.x;
#pragma unroll
  for (unsigned k = 0; k < each; ++k) {
    const unsigned i = first + k * BLOCK;
    if (i < n) out[i] = sigmoid(x[i]);
  }
}

// The loads of a thread are independent, so they are in flight at the same time. One bounds check
// covers all elements of a thread, so no load waits for a check.
template <unsigned each>
__device__ void together(const float* x, float* out, unsigned n) {
  const unsigned first = blockIdx.x * (BLOCK * each) + threadIdx.x;
  if (first + (each - 1) * BLOCK >= n) return one_by_one<each>(x, out, n);
  float value[each];
#pragma unroll
  for (unsigned k = 0; k < each; ++k) value[k] = x[first + k * BLOCK];
#pragma unroll
  for (unsigned k = 0; k < each; ++k) out[first + k * BLOCK] = sigmoid(value[k]);
}

// y' = rate * y * (1 - y), integrated by Euler's method. Each step depends on the previous one.
template <unsigned each>
__device__ void grow(float rate, const float* __restrict__ x, float* __restrict__ out, unsigned n) {
  const unsigned first = blockIdx.x * (BLOCK * each) + threadIdx.x;
  float y[each];
#pragma unroll
  for (unsigned k = 0; k < each; ++k) y[k] = first + k * BLOCK < n ? x[first + k * BLOCK] : 0.0f;
#pragma unroll (64 / each) // the same number of instructions per iteration for every `each`
  for (unsigned step = 0; step < STEPS; ++step) {
#pragma unroll
    for (unsigned k = 0; k < each; ++k) y[k] = fmaf(rate, fmaf(-y[k], y[k], y[k]), y[k]);
  }
#pragma unroll
  for (unsigned k = 0; k < each; ++k) {
    if (first + k * BLOCK < n) out[first + k * BLOCK] = y[k];
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    single(const float* x, float* out, unsigned n) {
  one_by_one<1>(x, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    in_turn(const float* x, float* out, unsigned n) {
  one_by_one<4>(x, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    two(const float* x, float* out, unsigned n) {
  together<2>(x, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    four(const float* x, float* out, unsigned n) {
  together<4>(x, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    eight(const float* x, float* out, unsigned n) {
  together<8>(x, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    growth_single(float rate, const float* __restrict__ x, float* __restrict__ out, unsigned n) {
  grow<1>(rate, x, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    growth_four(float rate, const float* __restrict__ x, float* __restrict__ out, unsigned n) {
  grow<4>(rate, x, out, n);
}
