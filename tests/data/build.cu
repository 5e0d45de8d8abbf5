// Kernels that tests/cuda_cpp_test.py assembles and reads the signatures of.
//   saxpy   out = a * x + y
//   rows    sums rows of at most 256 floats in static shared memory
//   wide    copies float4 by float4 through dynamic shared memory
//   pair    a cluster of two blocks, half and bfloat16 pointers

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "build_common.cuh"

/* extern "C" __global__ void commented(int n) {} */
// extern "C" __global__ void commented_too(int n) {}

extern "C" __global__ void saxpy(const float* __restrict__ x, const float* __restrict__ y,
                                 float* out, float a, int n) {
  int i = global_index();
  if (i < n) out[i] = a * x[i] + y[i];
}

extern "C" __global__ void __launch_bounds__(256, (2)) rows(const float* x, float* out, int n) {
  __shared__ float partial[256];
  partial[threadIdx.x] = threadIdx.x < n ? x[blockIdx.x * n + threadIdx.x] : 0.0f;
  for (int half = 128; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
  }
  if (threadIdx.x == 0) out[blockIdx.x] = partial[0];
}

extern "C" __global__ void wide(const float4 *x, float4 *out, size_t n /* vectors */) {
  extern __shared__ float4 tile[];
  size_t i = global_index();
  if (i < n) tile[threadIdx.x] = x[i];
  __syncthreads();
  if (i < n) out[i] = tile[threadIdx.x];
}

extern "C" __global__ __cluster_dims__(2, 1, 1) void pair(const __half* x, __nv_bfloat16* out,
                                                          long long n) {
  long long i = global_index();
  if (i < n) out[i] = __float2bfloat16(__half2float(x[i]));
}
