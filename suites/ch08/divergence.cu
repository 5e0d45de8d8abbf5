// Each of n elements has a kind, 0 or 1, and takes 128 steps of the rule of its kind:
//
//   kind 0: y += rate * (y - y * y), logistic growth
//   kind 1: y += rate * (y - y * y * y), growth with a cubic limit
//
// branching: a thread takes the branch of its element's kind.
// partitioned: like branching, but the first threads of a block get the elements of kind 0, and the
// last threads get the elements of kind 1.
// both_paths: a thread computes the steps of both rules, and keeps one result.
// one_path: a thread takes one sequence of steps, in which only a factor depends on the kind.

constexpr unsigned BLOCK = 256, WARPS = BLOCK / 32, STEPS = 128;

__device__ float logistic(float rate, float y) {
#pragma unroll 16
  for (unsigned step = 0; step < STEPS; ++step) y = fmaf(rate, fmaf(-y, y, y), y);
  return y;
}

__device__ float cubic(float rate, float y) {
#pragma unroll 16
  for (unsigned step = 0; step < STEPS; ++step) y = fmaf(rate, fmaf(-y * y, y, y), y);
  return y;
}

// Return the result of an element's steps. A warp with elements of both kinds executes both
// branches, one after the other.
__device__ float grown(float rate, float y, int kind) {
  if (kind == 0) {
    y = logistic(rate, y);
  } else {
    y = cubic(rate, y);
  }
  return y;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    branching(float rate, const float* __restrict__ x, const int* __restrict__ kind,
              float* __restrict__ out, unsigned n) {
  const unsigned i = blockIdx.x * BLOCK + threadIdx.x;
  if (i < n) out[i] = grown(rate, x[i], kind[i]);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    partitioned(float rate, const float* __restrict__ x, const int* __restrict__ kind,
                float* __restrict__ out, unsigned n) {
  __shared__ float value[BLOCK];
  __shared__ unsigned of_kind_0[WARPS];
  const unsigned first = blockIdx.x * BLOCK, i = first + threadIdx.x;
  const unsigned count = min(BLOCK, n - first);
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool mine = threadIdx.x < count, zero = mine && kind[i] == 0;
  const unsigned vote = __ballot_sync(~0u, zero);
  if (lane == 0) of_kind_0[warp] = __popc(vote);
  __syncthreads();
  unsigned before = __popc(vote & ((1u << lane) - 1)), zeros = 0;  // elements of kind 0
#pragma unroll
  for (unsigned w = 0; w < WARPS; ++w) {
    if (w < warp) before += of_kind_0[w];
    zeros += of_kind_0[w];
  }
  const unsigned place = zero ? before : zeros + threadIdx.x - before;
  if (mine) value[place] = x[i];
  __syncthreads();
  if (mine) value[threadIdx.x] = grown(rate, value[threadIdx.x], threadIdx.x < zeros ? 0 : 1);
  __syncthreads();
  if (mine) out[i] = value[place];
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    both_paths(float rate, const float* __restrict__ x, const int* __restrict__ kind,
               float* __restrict__ out, unsigned n) {
  const unsigned i = blockIdx.x * BLOCK + threadIdx.x;
  if (i >= n) return;
  const float y = x[i], zero = logistic(rate, y), one = cubic(rate, y);
  out[i] = kind[i] == 0 ? zero : one;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    one_path(float rate, const float* __restrict__ x, const int* __restrict__ kind,
             float* __restrict__ out, unsigned n) {
  const unsigned i = blockIdx.x * BLOCK + threadIdx.x;
  if (i >= n) return;
  const bool zero = kind[i] == 0;
  float y = x[i];
#pragma unroll 16
  for (unsigned step = 0; step < STEPS; ++step) {
    const float square = zero ? y : y * y;  // a multiplication and a selection, no branch
    y = fmaf(rate, fmaf(-square, y, y), y);
  }
  out[i] = y;
}
