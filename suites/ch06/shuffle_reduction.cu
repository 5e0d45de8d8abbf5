// out[r] = x[r][0] + ... + x[r][n-1] for short rows of ints. A block of 256 threads sums one row.
//
// shared_tree: the sums of the threads are reduced in a tree in shared memory, in 8 rounds.
// shuffle: warps add up their sums with shuffles, and the first warp adds up the warps' sums.
// redux: like shuffle, with one __reduce_add_sync in place of the five shuffles of a warp.
// warp_per_row: like redux, but each warp has its own row, so there is no sum over warps.

constexpr unsigned BLOCK = 256, WARPS = BLOCK / 32;

// Return the sum of the elements first, first + step, ... of a row.
__device__ int walk(const int* __restrict__ row, unsigned n, unsigned first, unsigned step) {
  int sum = 0;
  for (unsigned i = first; i < n; i += step) sum += row[i];
  return sum;
}

__device__ const int* row_of(const int* x, unsigned r, unsigned n) {
  return x + static_cast<size_t>(r) * n;
}

// Return the sum of a warp's values, in lane 0. All 32 lanes must call these functions.
__device__ int by_shuffles(int value) {
#pragma unroll
  for (unsigned half = 16; half > 0; half /= 2) value += __shfl_down_sync(~0u, value, half);
  return value;
}
__device__ int by_redux(int value) { return __reduce_add_sync(~0u, value); }

// Return the sum of the block's values, in thread 0.
template <int (*of_warp)(int)>
__device__ int of_block(int value) {
  __shared__ int part[WARPS];
  value = of_warp(value);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x < 32) value = of_warp(threadIdx.x < WARPS ? part[threadIdx.x] : 0);
  return value;
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    shared_tree(const int* __restrict__ x, int* __restrict__ out, unsigned n) {
  __shared__ int part[BLOCK];
  part[threadIdx.x] = walk(row_of(x, blockIdx.x, n), n, threadIdx.x, BLOCK);
  __syncthreads();
  for (unsigned half = BLOCK / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) out[blockIdx.x] = part[0];
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    shuffle(const int* __restrict__ x, int* __restrict__ out, unsigned n) {
  const int sum = of_block<by_shuffles>(walk(row_of(x, blockIdx.x, n), n, threadIdx.x, BLOCK));
  if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    redux(const int* __restrict__ x, int* __restrict__ out, unsigned n) {
  const int sum = of_block<by_redux>(walk(row_of(x, blockIdx.x, n), n, threadIdx.x, BLOCK));
  if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    warp_per_row(const int* __restrict__ x, int* __restrict__ out, unsigned rows, unsigned n) {
  const unsigned r = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (r >= rows) return;  // whole warps end here, so no lane of a sum is missing
  const int sum = by_redux(walk(row_of(x, r, n), n, lane, 32));
  if (lane == 0) out[r] = sum;
}
