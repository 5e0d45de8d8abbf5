// A layer of n neurons, out = relu(weights x), in a chain of layers. n is a multiple of 8, at most
// 1024. One warp computes one neuron.
//
// plain: starts when the previous kernel has ended, and loads its weights.

#include "dependent_launch_layer.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK)
    plain(const float4* weights, const float4* x, float* out, unsigned n) {
  Held held;
  hold(held, weights, n);
  finish(held, x, out, n);
}
