// Heat on a ring of n cells.
//
// step: next[i] = u[i] + rate * (u[i-1] - 2 * u[i] + u[i+1]), one thread per cell.
extern "C" __global__ void step(float rate, const float* __restrict__ u, float* __restrict__ next,
                                unsigned n) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float left = u[i > 0 ? i - 1 : n - 1], right = u[i + 1 < n ? i + 1 : 0];
  next[i] = u[i] + rate * (left - 2.0f * u[i] + right);
}
