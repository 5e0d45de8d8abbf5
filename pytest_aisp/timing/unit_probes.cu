// l2_read: repeatedly read a table of `vectors` 16-byte vectors, bypassing the L1. Each thread
//   reads four vectors in each of `rounds` rounds.
// shared_read: read 16-byte vectors from shared memory without bank conflicts. Each thread reads
//   four vectors in each of `rounds` rounds.
// atomic_add: each thread atomically adds 1 to `rounds` numbers. The 32 numbers of a warp are
//   contiguous.
// exponentials: each thread computes four independent chains of `rounds` exponentials on the
//   special function unit.
// fused_multiply_adds: each thread computes eight independent chains of `rounds` fp32 FMAs.
// one_load_each: a copy in which each thread has one load of 4 bytes in flight. A thread loads its
//   next number after it has stored the last one.
// nothing: an empty kernel, which only starts its blocks.

constexpr int BLOCK = 1024;

__device__ uint4 load_past_l1(const uint4* at) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}

__device__ unsigned mixed(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }

// `vectors` must be a power of two.
extern "C" __global__ void __launch_bounds__(BLOCK)
    l2_read(const uint4* table, unsigned* out, unsigned vectors, int rounds) {
  const unsigned threads = gridDim.x * BLOCK;
  unsigned at = blockIdx.x * BLOCK + threadIdx.x, seen = 0;
  for (int round = 0; round < rounds; ++round) {
    uint4 v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = load_past_l1(table + ((at + k * threads) & (vectors - 1)));
#pragma unroll
    for (int k = 0; k < 4; ++k) seen ^= mixed(v[k]);
    at += 4 * threads;
  }
  if (seen == 1) out[0] = seen;  // never true, but keeps the loads from being optimized away
}

extern "C" __global__ void __launch_bounds__(BLOCK) shared_read(unsigned* out, int rounds) {
  __shared__ uint4 table[BLOCK];
  table[threadIdx.x] = make_uint4(threadIdx.x, 2, 4, 8);
  __syncthreads();
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(table));
  unsigned seen = 0;
  for (int round = 0; round < rounds; ++round) {
    uint4 v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const unsigned at = base + 16 * (threadIdx.x ^ (k * 32));
      asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v[k].x), "=r"(v[k].y), "=r"(v[k].z), "=r"(v[k].w)
                   : "r"(at));
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) seen ^= mixed(v[k]);
  }
  if (seen == 1) out[0] = seen;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    atomic_add(unsigned* table, unsigned numbers, int rounds) {
  const unsigned threads = gridDim.x * BLOCK;
  unsigned at = blockIdx.x * BLOCK + threadIdx.x;
  for (int round = 0; round < rounds; ++round) {
    atomicAdd(table + (at & (numbers - 1)), 1u);
    at += threads;
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK) exponentials(float* out, int rounds) {
  float x[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) x[k] = 1e-3f * static_cast<float>(threadIdx.x + k);
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int k = 0; k < 4; ++k) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[k]));
  }
  if (x[0] + x[1] + x[2] + x[3] == 1.0f) out[0] = x[0];
}

extern "C" __global__ void __launch_bounds__(BLOCK) fused_multiply_adds(float* out, int rounds) {
  float x[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) x[k] = static_cast<float>(threadIdx.x + k);
  const float a = 0.5f + out[0], b = out[0];
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = fmaf(x[k], a, b);
  }
  float sum = 0;
#pragma unroll
  for (int k = 0; k < 8; ++k) sum += x[k];
  if (sum == 1.5f) out[1] = sum;
}

extern "C" __global__ void one_load_each(const float* x, float* out, unsigned n) {
#pragma unroll 1
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    out[i] = 2.0f * x[i];
}

extern "C" __global__ void nothing() {}
