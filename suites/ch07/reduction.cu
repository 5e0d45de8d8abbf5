// Sums of long rows of floats. blockIdx.y is the row.
//
// shared_tree: a block sums a tile of 1024 floats in a tree in shared memory, then adds the sum to
//     its row with an atomic.
// shuffle: like shared_tree, but warps reduce with shuffles.
// persistent: as many blocks as fit on the GPU loop over the rows. A thread has four loads in
//     flight.
// vectorized: like persistent, but with 16-byte loads.
// partials: like vectorized, but each block stores its sum instead of adding it to the row's sum.
// finish: one block per row adds up what `partials` stored, always in the same order.

constexpr unsigned BLOCK = 256, EACH = 4, WARPS = BLOCK / 32;

__device__ const float* row_of(const float* x, unsigned n) {
  return x + static_cast<size_t>(blockIdx.y) * n;
}

__device__ float tile_sum(const float* row, unsigned n) {
  const unsigned first = blockIdx.x * BLOCK * EACH + threadIdx.x;
  float value[EACH];
#pragma unroll
  for (unsigned k = 0; k < EACH; ++k) {
    const unsigned i = first + k * BLOCK;
    value[k] = i < n ? row[i] : 0.0f;
  }
  return (value[0] + value[1]) + (value[2] + value[3]);
}

// Return the block's sum, in thread 0.
__device__ float by_tree(float value) {
  __shared__ float part[BLOCK];
  part[threadIdx.x] = value;
  __syncthreads();
  for (unsigned half = BLOCK / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    __syncthreads();
  }
  return part[0];
}

__device__ float by_warp(float value) {
#pragma unroll
  for (unsigned half = 16; half > 0; half /= 2) value += __shfl_down_sync(~0u, value, half);
  return value;
}

// Return the block's sum, in thread 0.
__device__ float by_shuffles(float value) {
  __shared__ float part[WARPS];
  value = by_warp(value);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x < 32) value = by_warp(threadIdx.x < WARPS ? part[threadIdx.x] : 0.0f);
  return value;
}

__device__ float total(float x) { return x; }
__device__ float total(float4 x) { return (x.x + x.y) + (x.z + x.w); }

template <typename T>
__device__ float walk(const T* x, unsigned count) {
  const unsigned stride = gridDim.x * BLOCK;
  unsigned i = blockIdx.x * BLOCK + threadIdx.x;
  float sum[EACH] = {};
  for (; i + (EACH - 1) * stride < count; i += EACH * stride) {
    T value[EACH];
#pragma unroll
    for (unsigned k = 0; k < EACH; ++k) value[k] = x[i + k * stride];
#pragma unroll
    for (unsigned k = 0; k < EACH; ++k) sum[k] += total(value[k]);
  }
  for (; i < count; i += stride) sum[0] += total(x[i]);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Rows are aligned to 4 bytes only, and 16-byte loads need 16. Block 0 adds the unaligned elements
// at both ends.
__device__ float walk_in_vectors(const float* row, unsigned n) {
  const unsigned past = reinterpret_cast<size_t>(row) / sizeof(float) % 4;
  const unsigned head = min((4 - past) % 4, n), vectors = (n - head) / 4;
  const unsigned tail = n - head - 4 * vectors;
  float sum = walk(reinterpret_cast<const float4*>(row + head), vectors);
  if (blockIdx.x == 0 && threadIdx.x < head) sum += row[threadIdx.x];
  if (blockIdx.x == 0 && threadIdx.x < tail) sum += row[n - 1 - threadIdx.x];
  return sum;
}

__device__ void add_to_row(float* out, float sum) {
  if (threadIdx.x == 0) atomicAdd(&out[blockIdx.y], sum);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    shared_tree(const float* x, float* out, unsigned n) {
  add_to_row(out, by_tree(tile_sum(row_of(x, n), n)));
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    shuffle(const float* x, float* out, unsigned n) {
  add_to_row(out, by_shuffles(tile_sum(row_of(x, n), n)));
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    persistent(const float* x, float* out, unsigned n) {
  add_to_row(out, by_shuffles(walk(row_of(x, n), n)));
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    vectorized(const float* x, float* out, unsigned n) {
  add_to_row(out, by_shuffles(walk_in_vectors(row_of(x, n), n)));
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    partials(const float* x, float* parts, unsigned n) {
  const float sum = by_shuffles(walk_in_vectors(row_of(x, n), n));
  if (threadIdx.x == 0) parts[blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    finish(const float* parts, float* out, unsigned count) {
  float sum = 0.0f;
  for (unsigned i = threadIdx.x; i < count; i += BLOCK) sum += row_of(parts, count)[i];
  sum = by_shuffles(sum);
  if (threadIdx.x == 0) out[blockIdx.y] = sum;
}
