// Values of polynomials, one point per thread. A block has 128 threads.
//
// one: evaluates one polynomial at `n` points.
// many: evaluates several polynomials at `n` points each. The blocks with blockIdx.y == p evaluate
//     polynomial p.

#include "polynomial.cuh"

__device__ void evaluate(const float* coefficients, unsigned count, const float* points, float* out,
                         unsigned n) {
  __shared__ float part[MOST];
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  const float value = polynomial(coefficients, count, i < n ? points[i] : 0.0f, part);
  if (i < n) out[i] = value;
}

extern "C" __global__ void one(const float* coefficients, unsigned count, const float* points,
                               float* out, unsigned n) {
  evaluate(coefficients, count, points, out, n);
}

extern "C" __global__ void many(const float* coefficients, unsigned count, const float* points,
                                float* out, unsigned n) {
  const unsigned long long row = blockIdx.y;
  evaluate(coefficients + row * count, count, points + row * n, out + row * n, n);
}
