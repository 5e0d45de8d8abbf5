// out[m] = the logarithm of the determinant of a[m], for n symmetric positive definite 16 x 16
// matrices of floats, one matrix per thread. Only the lower triangle is read. The matrices are
// interleaved: element (r, c) of matrix m is a[(16 * r + c) * n + m].
//
// no_limit: no launch bounds. The compiler uses 160 registers per thread for sm_90.
// four_blocks: __launch_bounds__(128, 4), so the compiler may use 128. It spills a little.
// eight_blocks: __launch_bounds__(128, 8), so the compiler may use 64. Most of the factor spills.

constexpr unsigned BLOCK = 128, SIDE = 16;

// Compute the Cholesky factor row by row. All loops are unrolled, so every element of the factor
// has a register. A row needs all previous rows, so all rows are kept until the end.
__device__ void log_determinant(const float* __restrict__ a, float* __restrict__ out, unsigned n) {
  const unsigned m = blockIdx.x * BLOCK + threadIdx.x;
  if (m >= n) return;
  float factor[SIDE][SIDE], inverse[SIDE];  // inverse: of the factor's diagonal
  float product = 1.0f;                     // of the squares of the diagonal
#pragma unroll
  for (unsigned r = 0; r < SIDE; ++r) {
#pragma unroll
    for (unsigned c = 0; c <= r; ++c) {
      factor[r][c] = a[static_cast<size_t>(SIDE * r + c) * n + m];
    }
#pragma unroll
    for (unsigned c = 0; c <= r; ++c) {
      float rest = factor[r][c];
#pragma unroll
      for (unsigned k = 0; k < c; ++k) rest = fmaf(-factor[r][k], factor[c][k], rest);
      if (c < r) {
        factor[r][c] = rest * inverse[c];
      } else {
        inverse[r] = rsqrtf(rest);
        product *= rest;
      }
    }
  }
  out[m] = logf(product);
}

extern "C" __global__ void no_limit(const float* __restrict__ a, float* __restrict__ out,
                                    unsigned n) {
  log_determinant(a, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
    four_blocks(const float* __restrict__ a, float* __restrict__ out, unsigned n) {
  log_determinant(a, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    eight_blocks(const float* __restrict__ a, float* __restrict__ out, unsigned n) {
  log_determinant(a, out, n);
}
