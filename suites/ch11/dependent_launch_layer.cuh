// A layer of n <= 1024 neurons, out = relu(weights x). One function loads the weights, and another
// one computes.

#pragma once

constexpr unsigned BLOCK = 256, WARP = 32;
constexpr unsigned HELD = 8;  // vectors of weights per thread: a warp holds up to 1024 floats

struct Held {
  float4 weights[HELD];
};

// The row of weights of this warp.
__device__ inline unsigned row() { return (blockIdx.x * BLOCK + threadIdx.x) / WARP; }

// Starts to load the weights of this thread. Nothing here waits for them.
__device__ inline void hold(Held& held, const float4* weights, unsigned n) {
  const unsigned vectors = n / 4, lane = threadIdx.x % WARP;
#pragma unroll
  for (unsigned k = 0; k < HELD; ++k) {
    const unsigned i = lane + k * WARP;
    held.weights[k] =
        i < vectors ? weights[row() * vectors + i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  __syncwarp();  // no load moves below this point, so all kernels have as many loads in flight
}

__device__ inline float dot(float4 a, float4 b) {
  return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}

// Multiplies the weights by x, and writes the output of this warp's neuron.
__device__ inline void finish(const Held& held, const float4* x, float* out, unsigned n) {
  const unsigned vectors = n / 4, lane = threadIdx.x % WARP;
  float sum = 0.0f;
#pragma unroll
  for (unsigned k = 0; k < HELD; ++k) {
    const unsigned i = lane + k * WARP;
    if (i < vectors) sum += dot(held.weights[k], x[i]);
  }
  for (unsigned step = WARP / 2; step > 0; step /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, step);
  }
  if (lane == 0) out[row()] = fmaxf(sum, 0.0f);
}
