// out[r] = c[r][0] + c[r][1] * x[r] + ... + c[r][31] * x[r]^31: one polynomial per row of c.
//
// strided: a block copies 128 rows into shared memory, and each thread evaluates one of them.
// padded: like strided, with four unused floats after each row in shared memory.
// swizzled: like strided, with the coefficients of each row in another order in shared memory.
// straight: each thread reads its row from global memory.

constexpr unsigned BLOCK = 128, QUADS = 8;  // a row has 8 quads of 4 coefficients

// Return the place of a quad in shared memory. A quad fills 4 banks, beginning with bank 4 * (place
// % 8). Shared memory serves a 16-byte read for 8 lanes at a time. These lanes read the same quad
// of 8 rows, and `plain` puts these 8 quads into the same 4 banks.
__device__ unsigned plain(unsigned row, unsigned quad) { return row * QUADS + quad; }
__device__ unsigned pad(unsigned row, unsigned quad) { return row * (QUADS + 1) + quad; }
__device__ unsigned swizzle(unsigned row, unsigned quad) {
  return row * QUADS + (quad ^ row % QUADS);
}

// Four steps of Horner's rule.
__device__ float add_quad(float sum, float at, float4 quad) {
  sum = sum * at + quad.w;
  sum = sum * at + quad.z;
  sum = sum * at + quad.y;
  return sum * at + quad.x;
}

template <unsigned (*place)(unsigned, unsigned), unsigned quads>
__device__ void staged(const float4* __restrict__ c, const float* __restrict__ x,
                       float* __restrict__ out, unsigned rows) {
  __shared__ float4 tile[quads];
  const unsigned first = blockIdx.x * BLOCK, mine = first + threadIdx.x;
  const size_t start = static_cast<size_t>(first) * QUADS;
  const unsigned count = min(BLOCK, rows - first) * QUADS;  // quads of this block
  // 8 lanes copy one row, and write to 32 banks with every placement.
#pragma unroll
  for (unsigned k = 0; k < QUADS; ++k) {
    const unsigned i = k * BLOCK + threadIdx.x;
    if (i < count) tile[place(i / QUADS, i % QUADS)] = c[start + i];
  }
  __syncthreads();
  if (mine >= rows) return;
  const float at = x[mine];
  float sum = 0.0f;
#pragma unroll
  for (int k = QUADS - 1; k >= 0; --k) sum = add_quad(sum, at, tile[place(threadIdx.x, k)]);
  out[mine] = sum;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    strided(const float4* __restrict__ c, const float* __restrict__ x, float* __restrict__ out,
            unsigned rows) {
  staged<plain, BLOCK * QUADS>(c, x, out, rows);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    padded(const float4* __restrict__ c, const float* __restrict__ x, float* __restrict__ out,
           unsigned rows) {
  staged<pad, BLOCK*(QUADS + 1)>(c, x, out, rows);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    swizzled(const float4* __restrict__ c, const float* __restrict__ x, float* __restrict__ out,
             unsigned rows) {
  staged<swizzle, BLOCK * QUADS>(c, x, out, rows);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    straight(const float4* __restrict__ c, const float* __restrict__ x, float* __restrict__ out,
             unsigned rows) {
  const unsigned mine = blockIdx.x * BLOCK + threadIdx.x;
  if (mine >= rows) return;
  const float4* row = c + static_cast<size_t>(mine) * QUADS;
  float4 quad[QUADS];
#pragma unroll
  for (unsigned k = 0; k < QUADS; ++k) quad[k] = row[k];
  const float at = x[mine];
  float sum = 0.0f;
#pragma unroll
  for (int k = QUADS - 1; k >= 0; --k) sum = add_quad(sum, at, quad[k]);
  out[mine] = sum;
}
