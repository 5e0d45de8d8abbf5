// A layer of n neurons, out = relu(weights x), in a chain of layers. n is a multiple of 8, at most
// 1024. One warp computes one neuron. These kernels may start before the previous kernel of the
// stream has ended, so they must wait before they read x or write out.
//
// waits_first: waits for the previous kernel, then loads its weights.
// loads_first: loads its weights, then waits for the previous kernel.

#include "dependent_launch_layer.cuh"

// Lets the next kernel start as soon as SMs have room for its blocks. At that time, the results of
// this kernel are not ready. The next kernel must wait before it reads them.
__device__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Returns when the previous kernel has ended and its writes are visible. The previous kernel also
// waited for the kernel before it, and so on, so all earlier kernels have ended too.
__device__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

extern "C" __global__ void __launch_bounds__(BLOCK)
    waits_first(const float4* weights, const float4* x, float* out, unsigned n) {
  let_next_start();
  wait_for_previous();
  Held held;
  hold(held, weights, n);
  finish(held, x, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    loads_first(const float4* weights, const float4* x, float* out, unsigned n) {
  let_next_start();
  Held held;
  hold(held, weights, n);
  wait_for_previous();
  finish(held, x, out, n);
}
