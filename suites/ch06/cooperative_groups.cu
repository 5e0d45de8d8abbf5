// Heat on a ring of n cells.
//
// all_steps: `count` steps of `step` (in cooperative_groups_step.cu) in one kernel. After each
// step, all blocks wait for each other. So all blocks must run at once, which needs a cooperative
// launch.

#include <cooperative_groups.h>

// Neither pointer is __restrict__, because a step reads what other blocks wrote in the same kernel.
// With __restrict__, the compiler could use loads that return old values from the L1.
extern "C" __global__ void __launch_bounds__(256, 8)
    all_steps(float rate, const float* first, float* even, float* odd, unsigned n,
              unsigned count) {
  const cooperative_groups::grid_group grid = cooperative_groups::this_grid();
  const unsigned threads = gridDim.x * blockDim.x;
  const float* u = first;
  for (unsigned k = 0; k < count; ++k) {
    float* next = k % 2 ? odd : even;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += threads) {
      const float left = u[i > 0 ? i - 1 : n - 1], right = u[i + 1 < n ? i + 1 : 0];
      next[i] = u[i] + rate * (left - 2.0f * u[i] + right);
    }
    u = next;
    if (k + 1 < count) grid.sync();  // the end of the kernel is the last barrier
  }
}
