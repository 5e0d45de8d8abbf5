// Advance n oscillators: y holds n positions and then n velocities.
//
// copy_in: copies y to `now`, and sets *fast to 1 if a position is beyond the limit.
// step: one step of size dt, in place.
// step_if: like step, but only if *fast == wanted.
// choose: sets the condition of a conditional node in a graph to *fast.

#ifdef __CUDACC__
// The driver provides this function, so no header and no library are needed.
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned value);
#else
inline void cudaGraphSetConditional(unsigned long long, unsigned) {}  // the emulator has no graphs
#endif

__device__ unsigned element() { return blockIdx.x * blockDim.x + threadIdx.x; }

__device__ void advance(float dt, float* __restrict__ now, unsigned n) {
  const unsigned i = element();
  if (i >= n) return;
  const float velocity = now[n + i] - dt * now[i];
  now[n + i] = velocity;
  now[i] += dt * velocity;
}

extern "C" __global__ void copy_in(const float* __restrict__ y, float* __restrict__ now,
                                   float limit, int* fast, unsigned n) {
  const unsigned i = element();
  if (i >= n) return;
  now[i] = y[i];
  now[n + i] = y[n + i];
  if (fabsf(y[i]) > limit) atomicOr(fast, 1);
}

extern "C" __global__ void step(float dt, float* now, unsigned n) { advance(dt, now, n); }

extern "C" __global__ void step_if(float dt, float* now, const int* __restrict__ fast, int wanted,
                                   unsigned n) {
  if (*fast == wanted) advance(dt, now, n);
}

extern "C" __global__ void choose(unsigned long long handle, const int* fast) {
  cudaGraphSetConditional(handle, *fast);
}
