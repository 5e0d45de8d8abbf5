// out[0] += x[0] * y[0] + ... + x[n-1] * y[n-1]. All kernels loop over x and y in the same way.
//
// per_thread: each thread adds its sum to the result with an atomic.
// per_warp: the lanes of a warp first add up their sums with shuffles.
// per_block: the warps of a block first add up their sums in shared memory.

constexpr unsigned BLOCK = 256, EACH = 4, WARPS = BLOCK / 32;

// The grid has as many blocks as fit on the GPU at once, and each thread adds up many elements.
__device__ float walk(const float* __restrict__ x, const float* __restrict__ y, unsigned n) {
  const unsigned stride = gridDim.x * BLOCK;
  unsigned i = blockIdx.x * BLOCK + threadIdx.x;
  float sum[EACH] = {};
  for (; i + (EACH - 1) * stride < n; i += EACH * stride) {
    float left[EACH], right[EACH];
#pragma unroll
    for (unsigned k = 0; k < EACH; ++k) {
      left[k] = x[i + k * stride];
      right[k] = y[i + k * stride];
    }
#pragma unroll
    for (unsigned k = 0; k < EACH; ++k) sum[k] += left[k] * right[k];
  }
  for (; i < n; i += stride) sum[0] += x[i] * y[i];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Return the sum of a warp's values, in lane 0. All 32 lanes must call this function.
__device__ float of_warp(float value) {
#pragma unroll
  for (unsigned half = 16; half > 0; half /= 2) value += __shfl_down_sync(~0u, value, half);
  return value;
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    per_thread(const float* x, const float* y, float* out, unsigned n) {
  atomicAdd(out, walk(x, y, n));
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    per_warp(const float* x, const float* y, float* out, unsigned n) {
  const float sum = of_warp(walk(x, y, n));
  if (threadIdx.x % 32 == 0) atomicAdd(out, sum);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    per_block(const float* x, const float* y, float* out, unsigned n) {
  __shared__ float part[WARPS];
  const float sum = of_warp(walk(x, y, n));
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 32) {
    const float total = of_warp(threadIdx.x < WARPS ? part[threadIdx.x] : 0.0f);
    if (threadIdx.x == 0) atomicAdd(out, total);
  }
}
