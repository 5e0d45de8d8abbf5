// Shortest paths on a square grid of width x width cells, by relaxation. Entering cell i costs
// cost[i]. The distances have a border of one cell that no path enters.
//
// relax: after[i] = min(before[i], least of the four neighbors' before + cost[i]). If a distance
//     became smaller, it sets *changed to 1.
// again: tells the while node of a graph whether to run its body once more, and clears *changed.

#ifdef __CUDACC__
// The driver provides this function, so no header and no library are needed.
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned value);
#else
inline void cudaGraphSetConditional(unsigned long long, unsigned) {}  // the emulator has no graphs
#endif

extern "C" __global__ void relax(const int* __restrict__ cost, const int* __restrict__ before,
                                 int* __restrict__ after, int* changed, int width) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (column >= width) return;
  const int stride = width + 2, i = (row + 1) * stride + column + 1;
  const int beside = min(before[i - 1], before[i + 1]);
  const int above_or_below = min(before[i - stride], before[i + stride]);
  const int old = before[i];
  const int best = min(old, min(beside, above_or_below) + cost[row * width + column]);
  after[i] = best;
  if (best != old) atomicOr(changed, 1);
}

extern "C" __global__ void again(unsigned long long handle, int* changed) {
  cudaGraphSetConditional(handle, *changed);
  *changed = 0;
}
