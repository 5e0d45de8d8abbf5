// The value of a polynomial at one point, by Horner's rule.

#pragma once

constexpr unsigned MOST = 1024;  // coefficients that a block keeps in shared memory at a time

// Returns the polynomial's value at `at`. The first coefficient belongs to the highest power.
// `part` is shared memory of the block. All threads of the block must call this function.
__device__ inline float polynomial(const float* coefficients, unsigned count, float at,
                                   float (&part)[MOST]) {
  float value = 0.0f;
  for (unsigned first = 0; first < count; first += MOST) {
    const unsigned length = min(MOST, count - first);
    __syncthreads();  // every thread has used the previous part
    for (unsigned i = threadIdx.x; i < length; i += blockDim.x) part[i] = coefficients[first + i];
    __syncthreads();
#pragma unroll 8
    for (unsigned i = 0; i < length; ++i) value = fmaf(value, at, part[i]);
  }
  return value;
}
