// out[i] = x[i-2] + ... + x[i+2], clamped at the ends. A thread computes four sums, with a stride
// of a block.
//
// plain: ordinary loads, which are right even if another thread may write to x.
// ldg: loads with `__ldg`, which are right only if no thread writes to x while the kernel runs.
// restricted: ordinary loads, but `__restrict__` declares that no thread writes to x.

constexpr unsigned BLOCK = 256, EACH = 4, REACH = 2, TAPS = 2 * REACH + 1;

__device__ float load(const float* at) { return *at; }
__device__ float load_read_only(const float* at) { return __ldg(at); }

__device__ float sum(const float (&value)[TAPS]) {
  float total = value[0];
#pragma unroll
  for (unsigned tap = 1; tap < TAPS; ++tap) total += value[tap];
  return total;
}

// All loads come before the first store, so no load waits for a store that might change x.
template <auto load>
__device__ void inside(const float* x, float* out) {
  float value[EACH][TAPS];
#pragma unroll
  for (unsigned k = 0; k < EACH; ++k) {
#pragma unroll
    for (unsigned tap = 0; tap < TAPS; ++tap) value[k][tap] = load(x + k * BLOCK + tap);
  }
#pragma unroll
  for (unsigned k = 0; k < EACH; ++k) out[k * BLOCK] = sum(value[k]);
}

template <auto load>
__device__ void at_an_end(unsigned first, const float* x, float* out, unsigned n) {
  for (unsigned k = 0; k < EACH; ++k) {
    const unsigned i = first + k * BLOCK;
    if (i >= n) return;
    float value[TAPS];
    for (unsigned tap = 0; tap < TAPS; ++tap) {
      const unsigned past = i + tap < REACH ? REACH : i + tap;  // the index to load, plus REACH
      value[tap] = load(x + min(past - REACH, n - 1));
    }
    out[i] = sum(value);
  }
}

template <auto load>
__device__ void sums(const float* x, float* out, unsigned n) {
  const unsigned begin = blockIdx.x * (BLOCK * EACH);
  if (begin >= REACH && begin + BLOCK * EACH + REACH <= n) {  // same for the whole block
    inside<load>(x + begin - REACH + threadIdx.x, out + begin + threadIdx.x);
  } else {
    at_an_end<load>(begin + threadIdx.x, x, out, n);
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK) plain(const float* x, float* out, unsigned n) {
  sums<load>(x, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK) ldg(const float* x, float* out, unsigned n) {
  sums<load_read_only>(x, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    restricted(const float* __restrict__ x, float* __restrict__ out, unsigned n) {
  sums<load>(x, out, n);
}
