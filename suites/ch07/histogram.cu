// Count n values from 0 to 255. All kernels loop over the values in the same way, with four loads
// per thread in flight.
//
// global_atomics: each value increments its counter in the result itself, in the L2.
// privatized: a block counts in shared memory, and adds its 256 counts to the result at the end.
// per_warp: like privatized, but each of the block's warps has its own counters.
// aggregated: like privatized, but one lane adds the count of all lanes that have the same value.

constexpr unsigned BLOCK = 256, EACH = 4, WARPS = BLOCK / 32, BINS = 256;
constexpr int NONE = -1;
static_assert(BINS == BLOCK, "a thread a bin clears and flushes them");

// All threads of a block leave the loop together, so `count` may use a full warp.
template <typename Count>
__device__ void walk(const int* __restrict__ x, unsigned n, Count count) {
  const unsigned stride = gridDim.x * BLOCK;
  for (unsigned first = blockIdx.x * BLOCK; first < n; first += EACH * stride) {
    int value[EACH];
#pragma unroll
    for (unsigned k = 0; k < EACH; ++k) {
      const unsigned i = first + k * stride + threadIdx.x;
      value[k] = i < n ? x[i] : NONE;
    }
#pragma unroll
    for (unsigned k = 0; k < EACH; ++k) count(value[k]);
  }
}

__device__ void count_one(int* bins, int value) {
  if (value != NONE) atomicAdd(&bins[value], 1);
}

__device__ void count_alike(int* bins, int value) {
  const unsigned alike = __match_any_sync(~0u, value), lane = threadIdx.x % 32;
  const bool leads = lane + 1 == static_cast<unsigned>(__ffs(alike));
  if (leads && value != NONE) atomicAdd(&bins[value], __popc(alike));
}

template <unsigned copies, auto count>
__device__ void in_shared(const int* x, int* out, unsigned n) {
  __shared__ int bins[copies][BINS];
#pragma unroll
  for (unsigned copy = 0; copy < copies; ++copy) bins[copy][threadIdx.x] = 0;
  __syncthreads();
  int* mine = bins[threadIdx.x / 32 % copies];
  walk(x, n, [=](int value) { count(mine, value); });
  __syncthreads();
  int sum = 0;
#pragma unroll
  for (unsigned copy = 0; copy < copies; ++copy) sum += bins[copy][threadIdx.x];
  atomicAdd(&out[threadIdx.x], sum);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    global_atomics(const int* x, int* out, unsigned n) {
  walk(x, n, [=](int value) { count_one(out, value); });
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    privatized(const int* x, int* out, unsigned n) {
  in_shared<1, count_one>(x, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    per_warp(const int* x, int* out, unsigned n) {
  in_shared<WARPS, count_one>(x, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    aggregated(const int* x, int* out, unsigned n) {
  in_shared<1, count_alike>(x, out, n);
}
