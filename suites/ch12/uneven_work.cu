// Advance generators by very different numbers of steps. Lane l of a warp runs item i's generator
// from seed[i] + l, and stores the state that it reaches in out[i][l].
//
// static_share: warp w runs the items of its contiguous share, one after another.
// interleaved: warp w runs the items w, w + warps, w + 2 * warps, and so on.
// queue: each warp takes the next item from a counter that all warps share.
// queue_by_4: like queue, but a warp takes four items at once.
// warp_per_item: warp w runs item w only. The grid has a warp for each item.

// The factor and the increment of a step are arguments. If they were constants, the compiler would
// turn eight steps into one.
__device__ void run_item(const unsigned* __restrict__ seed, const unsigned* __restrict__ steps,
                         unsigned* __restrict__ out, unsigned factor, unsigned increment,
                         unsigned i) {
  const unsigned lane = threadIdx.x % 32, count = steps[i];
  unsigned state = seed[i] + lane;
#pragma unroll 8
  for (unsigned k = 0; k < count; ++k) state = factor * state + increment;
  out[i * 32 + lane] = state;
}

__device__ unsigned warp_of_grid() { return (blockIdx.x * blockDim.x + threadIdx.x) / 32; }

__device__ unsigned warps_of_grid() { return gridDim.x * blockDim.x / 32; }

extern "C" __global__ void static_share(const unsigned* seed, const unsigned* steps, unsigned* out,
                                        unsigned factor, unsigned increment, unsigned n) {
  const unsigned share = (n + warps_of_grid() - 1) / warps_of_grid();
  const unsigned begin = warp_of_grid() * share, end = min(begin + share, n);
  for (unsigned i = begin; i < end; ++i) run_item(seed, steps, out, factor, increment, i);
}

extern "C" __global__ void interleaved(const unsigned* seed, const unsigned* steps, unsigned* out,
                                       unsigned factor, unsigned increment, unsigned n) {
  for (unsigned i = warp_of_grid(); i < n; i += warps_of_grid())
    run_item(seed, steps, out, factor, increment, i);
}

// The first lane takes items for its whole warp, so a warp makes one atomic at a time.
template <unsigned each>
__device__ void from_queue(const unsigned* seed, const unsigned* steps, unsigned* out,
                           unsigned factor, unsigned increment, unsigned* next, unsigned n) {
  while (true) {
    unsigned begin = 0;
    if (threadIdx.x % 32 == 0) begin = atomicAdd(next, each);
    begin = __shfl_sync(~0u, begin, 0);
    if (begin >= n) return;
    const unsigned end = min(begin + each, n);
    for (unsigned i = begin; i < end; ++i) run_item(seed, steps, out, factor, increment, i);
  }
}

extern "C" __global__ void queue(const unsigned* seed, const unsigned* steps, unsigned* out,
                                 unsigned factor, unsigned increment, unsigned* next, unsigned n) {
  from_queue<1>(seed, steps, out, factor, increment, next, n);
}

extern "C" __global__ void queue_by_4(const unsigned* seed, const unsigned* steps, unsigned* out,
                                      unsigned factor, unsigned increment, unsigned* next,
                                      unsigned n) {
  from_queue<4>(seed, steps, out, factor, increment, next, n);
}

extern "C" __global__ void warp_per_item(const unsigned* seed, const unsigned* steps, unsigned* out,
                                         unsigned factor, unsigned increment, unsigned n) {
  if (warp_of_grid() < n) run_item(seed, steps, out, factor, increment, warp_of_grid());
}
