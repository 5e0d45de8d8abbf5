// gather_sum: partial[r][b] = the sum of values[index[r][i]] over all i of block b, for resample r.

constexpr unsigned BLOCK = 256, EACH = 32, BATCH = 8;

// Return the sum of the threads' values, in thread 0. All threads of the block must call this
// function.
__device__ float block_sum(float value) {
  __shared__ float of_warp[BLOCK / 32];
  for (unsigned apart = 16; apart > 0; apart /= 2) {
    value += __shfl_down_sync(0xffffffffu, value, apart);
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.0f;
  if (threadIdx.x == 0) {
    for (unsigned warp = 0; warp < BLOCK / 32; ++warp) total += of_warp[warp];
  }
  return total;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    gather_sum(const float* __restrict__ values, const int* __restrict__ index,
               float* __restrict__ partial, unsigned n) {
  index += static_cast<size_t>(blockIdx.y) * n;
  const unsigned begin = blockIdx.x * (BLOCK * EACH), end = min(begin + BLOCK * EACH, n);
  unsigned i = begin + threadIdx.x;
  float sum = 0.0f;
  if (end - begin == BLOCK * EACH) {  // no bounds checks: eight gathers are in flight
    for (; i < end; i += BATCH * BLOCK) {
      float value[BATCH];
#pragma unroll
      for (unsigned k = 0; k < BATCH; ++k) value[k] = values[index[i + k * BLOCK]];
#pragma unroll
      for (unsigned k = 0; k < BATCH; ++k) sum += value[k];
    }
  }
  for (; i < end; i += BLOCK) sum += values[index[i]];
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.y * gridDim.x + blockIdx.x] = sum;
}
