// out = L * x for a lower triangular matrix L of m rows. Row i has i + 1 elements, and the rows of
// `packed` follow one another without gaps.
//
// in_order: warp w computes row w.
// longest_first: warp w computes row m - 1 - w.
// in_pieces: like in_order, but a warp handles 2048 elements of a row, and adds by an atomic.

constexpr unsigned BLOCK = 256, WARPS = BLOCK / 32, PIECE = 2048;

__device__ unsigned warp_of_grid() { return blockIdx.x * WARPS + threadIdx.x / 32; }

// Return the dot product of elements `begin` to `end` of a row with x, in lane 0. Each lane has
// four loads in flight.
__device__ float dot(const float* __restrict__ packed, const float* __restrict__ x, unsigned row,
                     unsigned begin, unsigned end) {
  const float* l = packed + static_cast<size_t>(row) * (row + 1) / 2;
  float sum[4] = {};
  unsigned i = begin + threadIdx.x % 32;
#pragma unroll 1
  for (; i + 3 * 32 < end; i += 4 * 32) {
    float value[4];
#pragma unroll
    for (unsigned k = 0; k < 4; ++k) value[k] = l[i + k * 32];
#pragma unroll
    for (unsigned k = 0; k < 4; ++k) sum[k] = fmaf(value[k], x[i + k * 32], sum[k]);
  }
#pragma unroll 1
  for (; i < end; i += 32) sum[0] = fmaf(l[i], x[i], sum[0]);
  float total = (sum[0] + sum[1]) + (sum[2] + sum[3]);
#pragma unroll
  for (unsigned half = 16; half > 0; half /= 2) total += __shfl_down_sync(~0u, total, half);
  return total;
}

__device__ void whole_row(const float* packed, const float* x, float* out, unsigned row) {
  const float total = dot(packed, x, row, 0, row + 1);
  if (threadIdx.x % 32 == 0) out[row] = total;
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    in_order(const float* packed, const float* x, float* out, unsigned m) {
  const unsigned w = warp_of_grid();
  if (w < m) whole_row(packed, x, out, w);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    longest_first(const float* packed, const float* x, float* out, unsigned m) {
  const unsigned w = warp_of_grid();
  if (w < m) whole_row(packed, x, out, m - 1 - w);
}

// blockIdx.y is the number of the piece. A short row has fewer pieces than the grid has, so warps
// without a piece end at once.
extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    in_pieces(const float* packed, const float* x, float* out, unsigned m) {
  const unsigned row = warp_of_grid(), begin = blockIdx.y * PIECE;
  if (row >= m || begin > row) return;
  const float total = dot(packed, x, row, begin, min(begin + PIECE, row + 1));
  if (threadIdx.x % 32 == 0) atomicAdd(&out[row], total);
}
