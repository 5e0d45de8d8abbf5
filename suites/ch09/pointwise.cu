// out[i] = GELU(x[i]) in its tanh approximation, computed as x / (1 + exp(-2 u)).
//
// gelu: a thread computes four neighboring elements, with 16-byte accesses.

constexpr unsigned BLOCK = 256;

__device__ float gelu_of(float x) {
  const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  // __fdividef returns 0 for divisors above 2^126. Here, 0 is correct: if exp(-2 u) is that large,
  // GELU is smaller than every normal number.
  return __fdividef(x, 1.0f + expf(-2.0f * u));
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    gelu(const float* __restrict__ x, float* __restrict__ out, unsigned n) {
  const unsigned i = blockIdx.x * BLOCK + threadIdx.x;
  if (i < n / 4) {
    float4 four = reinterpret_cast<const float4*>(x)[i];
    four.x = gelu_of(four.x);
    four.y = gelu_of(four.y);
    four.z = gelu_of(four.z);
    four.w = gelu_of(four.w);
    reinterpret_cast<float4*>(out)[i] = four;
  }
  // The last elements do not fill a vector.
  const unsigned rest = n / 4 * 4 + threadIdx.x;
  if (blockIdx.x == 0 && rest < n) out[rest] = gelu_of(x[rest]);
}
