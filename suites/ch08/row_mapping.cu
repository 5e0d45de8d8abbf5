// out[row] = the Euclidean norm of a row of n floats.
//
// thread_per_row: one thread reads a row.
// warp_per_row: the 32 lanes of a warp read a row together and add up their sums with shuffles.
// block_per_row: the 256 threads of a block read a row together.

constexpr unsigned BLOCK = 256, WARPS = BLOCK / 32;

// Sum the squares of the elements `lane`, `lane + lanes`, ... of a row. Every kernel has four loads
// per thread in flight, so the kernels differ only in how elements are assigned to threads.
template <unsigned lanes>
__device__ float sum_of_squares(const float* __restrict__ row, unsigned n, unsigned lane) {
  float sum[4] = {};
  unsigned i = lane;
#pragma unroll 1 // no more than four loads in flight
  for (; i + 3 * lanes < n; i += 4 * lanes) {
    float value[4];
#pragma unroll
    for (unsigned k = 0; k < 4; ++k) value[k] = row[i + k * lanes];
#pragma unroll
    for (unsigned k = 0; k < 4; ++k) sum[k] = fmaf(value[k], value[k], sum[k]);
  }
#pragma unroll 1
  for (; i < n; i += lanes) sum[0] = fmaf(row[i], row[i], sum[0]);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

__device__ float by_warp(float value) {
#pragma unroll
  for (unsigned half = 16; half > 0; half /= 2) value += __shfl_down_sync(~0u, value, half);
  return value;
}

__device__ const float* row_of(const float* x, unsigned row, unsigned n) {
  return x + static_cast<size_t>(row) * n;
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    thread_per_row(const float* x, float* out, unsigned rows, unsigned n) {
  const unsigned row = blockIdx.x * BLOCK + threadIdx.x;
  if (row < rows) out[row] = sqrtf(sum_of_squares<1>(row_of(x, row, n), n, 0));
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    warp_per_row(const float* x, float* out, unsigned rows, unsigned n) {
  const unsigned row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;  // the whole warp ends
  const float sum = by_warp(sum_of_squares<32>(row_of(x, row, n), n, lane));
  if (lane == 0) out[row] = sqrtf(sum);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    block_per_row(const float* x, float* out, unsigned rows, unsigned n) {
  __shared__ float part[WARPS];
  float sum = by_warp(sum_of_squares<BLOCK>(row_of(x, blockIdx.x, n), n, threadIdx.x));
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 32) {
    sum = by_warp(threadIdx.x < WARPS ? part[threadIdx.x] : 0.0f);
    if (threadIdx.x == 0) out[blockIdx.x] = sqrtf(sum);
  }
}
