// out = x + table[index] on rows of 128 floats. A warp handles a row, 16 bytes per lane.
//
// normal: no hints. All lines have the same priority in the L2.
// streamed: x, index and out, which are used once, have evict-first hints.
// kept: like streamed, but the table, which is used again, has evict-last hints.
// release: sets the table's lines in the L2 back to normal priority.
//
// Each hint applies to a single access. No part of the L2 is set aside.

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

// There is no intrinsic for evict_last, so this load gets the policy as a number in a register.
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
  const size_t line = thread();  // 128 bytes, or 8 float4
  if (line >= lines) return;
  asm volatile("applypriority.global.L2::evict_normal [%0], 128;"
               :: "l"(__cvta_generic_to_global(table + 8 * line)) : "memory");
}
