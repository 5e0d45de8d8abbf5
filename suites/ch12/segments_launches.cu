// Sum segments of x, as segments.cu does, but with kernels that another kernel launches. Segment s
// is x[offsets[s]] to x[offsets[s + 1] - 1], and may be empty.
//
// launch_segments: a thread per segment launches a child of one block, which sums the segment. The
// child runs the same code as one_segment in segments.cu.

constexpr unsigned WARPS = 8;

__device__ float warp_sum(float sum) {
#pragma unroll
  for (unsigned half = 16; half; half /= 2) sum += __shfl_xor_sync(~0u, sum, half);
  return sum;
}

__global__ void child(const float* __restrict__ x, const int* __restrict__ offsets,
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

extern "C" __global__ void launch_segments(const float* x, const int* offsets, float* out,
                                           unsigned segments) {
  const unsigned s = blockIdx.x * blockDim.x + threadIdx.x;
  // Children in this stream do not wait for each other. The parent ends when all children have
  // ended.
  if (s < segments) child<<<1, WARPS * 32, 0, cudaStreamFireAndForget>>>(x, offsets, out, s);
}
