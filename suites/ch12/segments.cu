// Sum segments of x. Segment s is x[offsets[s]] to x[offsets[s + 1] - 1], and may be empty.
//
// one_segment: one block sums segment s, and stores the sum in out[s].
// block_per_segment: sums all segments in one launch. Block s sums segment s.
// warp_per_segment: like block_per_segment, but one warp sums a segment. No warp waits for another.

constexpr unsigned WARPS = 8;

__device__ float warp_sum(float sum) {
#pragma unroll
  for (unsigned half = 16; half; half /= 2) sum += __shfl_xor_sync(~0u, sum, half);
  return sum;
}

__device__ void sum_by_block(const float* __restrict__ x, const int* __restrict__ offsets,
                             float* __restrict__ out, unsigned s) {
  __shared__ float sums[WARPS];
  const unsigned begin = offsets[s], end = offsets[s + 1];
  float sum = 0.0f;
  for (unsigned i = begin + threadIdx.x; i < end; i += WARPS * 32) sum += x[i];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = warp_sum(threadIdx.x < WARPS ? sums[threadIdx.x] : 0.0f);
  if (threadIdx.x == 0) out[s] = sum;
}

extern "C" __global__ void one_segment(const float* x, const int* offsets, float* out,
                                       unsigned s) {
  sum_by_block(x, offsets, out, s);
}

extern "C" __global__ void block_per_segment(const float* x, const int* offsets, float* out) {
  sum_by_block(x, offsets, out, blockIdx.x);
}

extern "C" __global__ void warp_per_segment(const float* __restrict__ x,
                                            const int* __restrict__ offsets,
                                            float* __restrict__ out, unsigned segments) {
  const unsigned s = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (s >= segments) return;
  const unsigned end = offsets[s + 1];
  float sum = 0.0f;
  for (unsigned i = offsets[s] + threadIdx.x % 32; i < end; i += 32) sum += x[i];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) out[s] = sum;
}
