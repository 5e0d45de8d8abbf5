// out[m] = a[m] * b[m] for n pairs of 4 x 4 matrices of floats, one pair per thread.
//
// unbounded: the compiler does not know the size of a block.
// bounded: __launch_bounds__(256), so the compiler may use up to 255 registers per thread.
// eight_blocks: __launch_bounds__(256, 8), so the compiler may use 32 registers, and 8 blocks fit
// on an SM.

constexpr unsigned BLOCK = 256, ROWS = 4;

// All rows of a and b are loaded into registers. Each row of a gives one row of the product.
__device__ void multiply(const float4* __restrict__ a, const float4* __restrict__ b,
                         float4* __restrict__ out, unsigned n) {
  const unsigned m = blockIdx.x * blockDim.x + threadIdx.x;
  if (m >= n) return;
  const size_t first = static_cast<size_t>(m) * ROWS;
  float4 left[ROWS], right[ROWS];
#pragma unroll
  for (unsigned k = 0; k < ROWS; ++k) {
    left[k] = a[first + k];
    right[k] = b[first + k];
  }
#pragma unroll
  for (unsigned k = 0; k < ROWS; ++k) {
    const float4 l = left[k];
    float4 row;
    row.x = l.x * right[0].x + l.y * right[1].x + l.z * right[2].x + l.w * right[3].x;
    row.y = l.x * right[0].y + l.y * right[1].y + l.z * right[2].y + l.w * right[3].y;
    row.z = l.x * right[0].z + l.y * right[1].z + l.z * right[2].z + l.w * right[3].z;
    row.w = l.x * right[0].w + l.y * right[1].w + l.z * right[2].w + l.w * right[3].w;
    out[first + k] = row;
  }
}

extern "C" __global__ void unbounded(const float4* __restrict__ a, const float4* __restrict__ b,
                                     float4* __restrict__ out, unsigned n) {
  multiply(a, b, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    bounded(const float4* __restrict__ a, const float4* __restrict__ b, float4* __restrict__ out,
            unsigned n) {
  multiply(a, b, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    eight_blocks(const float4* __restrict__ a, const float4* __restrict__ b,
                 float4* __restrict__ out, unsigned n) {
  multiply(a, b, out, n);
}
