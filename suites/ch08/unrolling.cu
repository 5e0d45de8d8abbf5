// out[i] = the polynomial of `count` coefficients at x[i], for n floats, by Horner's rule. A block
// keeps the coefficients in shared memory.
//
// compiled: a loop without a pragma, so the compiler decides how often to unroll it.
// rolled: #pragma unroll 1, so each coefficient takes an iteration of the loop.
// by_16: #pragma unroll 16.
// known: like compiled, but `count` is a constant, so the compiler unrolls the loop completely.
// four_points: like compiled, with four points per thread, which share each loaded coefficient.

constexpr unsigned BLOCK = 256, COUNT = 128;

struct Compiled {
  template <unsigned points>
  __device__ static void evaluate(const float* c, unsigned count, const float (&at)[points],
                                  float (&sum)[points]) {
    for (unsigned k = 0; k < count; ++k) {
#pragma unroll
      for (unsigned p = 0; p < points; ++p) sum[p] = fmaf(sum[p], at[p], c[k]);
    }
  }
};

struct Rolled {
  __device__ static void evaluate(const float* c, unsigned count, const float (&at)[1],
                                  float (&sum)[1]) {
#pragma unroll 1
    for (unsigned k = 0; k < count; ++k) sum[0] = fmaf(sum[0], at[0], c[k]);
  }
};

struct By16 {
  __device__ static void evaluate(const float* c, unsigned count, const float (&at)[1],
                                  float (&sum)[1]) {
#pragma unroll 16
    for (unsigned k = 0; k < count; ++k) sum[0] = fmaf(sum[0], at[0], c[k]);
  }
};

struct Known {
  __device__ static void evaluate(const float* c, unsigned, const float (&at)[1], float (&sum)[1]) {
#pragma unroll
    for (unsigned k = 0; k < COUNT; ++k) sum[0] = fmaf(sum[0], at[0], c[k]);
  }
};

template <typename Loop, unsigned points>
__device__ void polynomial(const float* __restrict__ coefficients, unsigned count,
                           const float* __restrict__ x, float* __restrict__ out, unsigned n) {
  __shared__ float c[COUNT];
  for (unsigned k = threadIdx.x; k < count; k += BLOCK) c[k] = coefficients[k];
  __syncthreads();
  const unsigned first = blockIdx.x * (BLOCK * points) + threadIdx.x;
  float at[points], sum[points] = {};
#pragma unroll
  for (unsigned p = 0; p < points; ++p) at[p] = first + p * BLOCK < n ? x[first + p * BLOCK] : 0.0f;
  Loop::evaluate(c, count, at, sum);
#pragma unroll
  for (unsigned p = 0; p < points; ++p) {
    if (first + p * BLOCK < n) out[first + p * BLOCK] = sum[p];
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    compiled(const float* coefficients, unsigned count, const float* x, float* out, unsigned n) {
  polynomial<Compiled, 1>(coefficients, count, x, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    rolled(const float* coefficients, unsigned count, const float* x, float* out, unsigned n) {
  polynomial<Rolled, 1>(coefficients, count, x, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    by_16(const float* coefficients, unsigned count, const float* x, float* out, unsigned n) {
  polynomial<By16, 1>(coefficients, count, x, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    known(const float* coefficients, unsigned count, const float* x, float* out, unsigned n) {
  polynomial<Known, 1>(coefficients, count, x, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    four_points(const float* coefficients, unsigned count, const float* x, float* out, unsigned n) {
  polynomial<Compiled, 4>(coefficients, count, x, out, n);
}
