// out = x + table[index], row by row: rows of 128 floats, a warp a row, 16 bytes a lane.
//
// normal: every access leaves its line in the L2 at the same priority.
// streamed: what is used once, x, index and out, is the first to be evicted.
// kept: and the table, which is used again, the last.
// release: gives the table's lines in the L2 back to the normal priority.

constexpr int LANES = 32;

__device__ size_t thread() { return size_t(blockIdx.x) * blockDim.x + threadIdx.x; }

__device__ float4 sum(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

extern "C" __global__ void normal(const float4* __restrict__ x, const float4* __restrict__ table,
                                  const int* __restrict__ index, float4* __restrict__ out,
                                  int rows) {
  const size_t i = thread(), row = i / LANES;
  if (row < rows) out[i] = sum(x[i], table[size_t(index[row]) * LANES + i % LANES]);
}

extern "C" __global__ void streamed(const float4* __restrict__ x, const float4* __restrict__ table,
                                    const int* __restrict__ index, float4* __restrict__ out,
                                    int rows) {
  const size_t i = thread(), row = i / LANES;
  if (row >= rows) return;
  const float4* entry = table + size_t(__ldcs(index + row)) * LANES + i % LANES;
  __stcs(out + i, sum(__ldcs(x + i), *entry));
}

// No intrinsic says evict_last: the policy is a number in a register that a load is given.
__device__ float4 load_kept(const float4* from) {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  float4 value;
  asm("ld.global.nc.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
      : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
      : "l"(__cvta_generic_to_global(from)), "l"(policy));
  return value;
}

extern "C" __global__ void kept(const float4* __restrict__ x, const float4* __restrict__ table,
                                const int* __restrict__ index, float4* __restrict__ out,
                                int rows) {
  const size_t i = thread(), row = i / LANES;
  if (row >= rows) return;
  const float4* entry = table + size_t(__ldcs(index + row)) * LANES + i % LANES;
  __stcs(out + i, sum(__ldcs(x + i), load_kept(entry)));
}

extern "C" __global__ void release(const float4* table, int lines) {
  const size_t line = thread();  // 128 bytes, 8 times 16
  if (line >= lines) return;
  asm volatile("applypriority.global.L2::evict_normal [%0], 128;"
               :: "l"(__cvta_generic_to_global(table + 8 * line)) : "memory");
}
