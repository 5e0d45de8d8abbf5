// out[r] = c[r][0] + c[r][1] * x[r] + ... + c[r][31] * x[r]^31: one polynomial per row of c.
//
// strided: a block copies 128 rows into shared memory, and each thread evaluates one of them.
// padded: strided, with an unused float after each row in shared memory.
// swizzled: strided, with the coefficients of each row in another order in shared memory.
// straight: each thread reads its row from global memory in 16-byte loads.

constexpr unsigned BLOCK = 128, TERMS = 32, BANKS = 32;

// Where a coefficient lies in shared memory. Word w lies in bank w % 32. In the evaluation, the 32
// lanes of a warp read the same column of 32 rows. With `plain`, these words lie in one bank.
__device__ unsigned plain(unsigned row, unsigned column) { return row * TERMS + column; }
__device__ unsigned pad(unsigned row, unsigned column) { return row * (TERMS + 1) + column; }
__device__ unsigned swizzle(unsigned row, unsigned column) {
  return row * TERMS + (column ^ row % BANKS);
}

template <unsigned (*place)(unsigned, unsigned), unsigned words>
__device__ void staged(const float* __restrict__ c, const float* __restrict__ x,
                       float* __restrict__ out, unsigned rows) {
  __shared__ float tile[words];
  const unsigned first = blockIdx.x * BLOCK, mine = first + threadIdx.x;
  const size_t start = static_cast<size_t>(first) * TERMS;
  const unsigned count = min(BLOCK, rows - first) * TERMS;  // coefficients of this block
  // A warp copies one row at a time: 32 neighbors, in 32 banks with every placement.
#pragma unroll
  for (unsigned k = 0; k < TERMS; ++k) {
    const unsigned i = k * BLOCK + threadIdx.x;
    if (i < count) tile[place(i / TERMS, i % TERMS)] = c[start + i];
  }
  __syncthreads();
  if (mine >= rows) return;
  const float at = x[mine];
  float sum = tile[place(threadIdx.x, TERMS - 1)];
#pragma unroll
  for (int k = TERMS - 2; k >= 0; --k) sum = sum * at + tile[place(threadIdx.x, k)];
  out[mine] = sum;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    strided(const float* __restrict__ c, const float* __restrict__ x, float* __restrict__ out,
            unsigned rows) {
  staged<plain, BLOCK * TERMS>(c, x, out, rows);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    padded(const float* __restrict__ c, const float* __restrict__ x, float* __restrict__ out,
           unsigned rows) {
  staged<pad, BLOCK*(TERMS + 1)>(c, x, out, rows);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    swizzled(const float* __restrict__ c, const float* __restrict__ x, float* __restrict__ out,
             unsigned rows) {
  staged<swizzle, BLOCK * TERMS>(c, x, out, rows);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    straight(const float4* __restrict__ c, const float* __restrict__ x, float* __restrict__ out,
             unsigned rows) {
  const unsigned mine = blockIdx.x * BLOCK + threadIdx.x;
  if (mine >= rows) return;
  const float4* row = c + static_cast<size_t>(mine) * (TERMS / 4);
  float4 quad[TERMS / 4];
#pragma unroll
  for (unsigned k = 0; k < TERMS / 4; ++k) quad[k] = row[k];
  const float at = x[mine];
  float sum = 0.0f;
#pragma unroll
  for (int k = TERMS / 4 - 1; k >= 0; --k) {
    sum = sum * at + quad[k].w;
    sum = sum * at + quad[k].z;
    sum = sum * at + quad[k].y;
    sum = sum * at + quad[k].x;
  }
  out[mine] = sum;
}
