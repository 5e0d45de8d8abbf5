// chase: one thread follows `steps` links of a list in global memory. Each load waits for the last.
//   `past_l1` skips the L1.
// chase_shared: the same in shared memory, for a list of `links` links.
// read_cached: all blocks read the same table of `vectors` 16-byte vectors again and again, through
//   the L1. Each thread reads `rounds` times four of them.
// line_latencies: for each of `lines` lines of 128 bytes, the clock cycles of one load from the L2.
// fused_multiply_adds: `rounds` times eight independent chains of fp32 a thread.
// dependent_multiply_adds: one chain of `steps` multiply-adds.

constexpr int BLOCK = 1024;
constexpr int LINKS = 4096;

__device__ unsigned load_past_l1(const unsigned* at) {
  unsigned v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

__device__ unsigned load_through_l1(const unsigned* at) {
  unsigned v;
  asm volatile("ld.global.ca.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

extern "C" __global__ void chase(const unsigned* list, unsigned* out, int steps, bool past_l1) {
  unsigned at = 0;
  if (past_l1) {
    for (int step = 0; step < steps; ++step) at = load_past_l1(list + at);
  } else {
    for (int step = 0; step < steps; ++step) at = load_through_l1(list + at);
  }
  out[0] = at;
}

extern "C" __global__ void chase_shared(const unsigned* list, unsigned* out, int links, int steps) {
  __shared__ volatile unsigned copied[LINKS];
  for (int i = 0; i < links; ++i) copied[i] = list[i];
  unsigned at = 0;
  for (int step = 0; step < steps; ++step) at = copied[at];
  out[0] = at;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    read_cached(const uint4* table, unsigned* out, unsigned vectors, int rounds) {
  unsigned at = threadIdx.x, seen = 0;
  for (int round = 0; round < rounds; ++round) {
    uint4 v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint4* from = table + ((at + k * BLOCK) & (vectors - 1));
      asm volatile("ld.global.ca.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v[k].x), "=r"(v[k].y), "=r"(v[k].z), "=r"(v[k].w)
                   : "l"(from)
                   : "memory");
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) seen ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    at += 4 * BLOCK;
  }
  if (seen == 1) out[0] = seen;  // never, but the compiler cannot know
}

extern "C" __global__ void line_latencies(const unsigned* table, unsigned* cycles, int lines) {
  __shared__ volatile unsigned arrived[2];
  for (int line = 0; line < lines; ++line) {
    const unsigned* at = table + 32 * line;
    arrived[0] = load_past_l1(at);  // now the line is in the L2
    const long long before = clock64();
    arrived[1] = load_past_l1(at);  // a warp issues in order, and this store waits for the value
    const long long after = clock64();
    cycles[line] = static_cast<unsigned>(after - before);
  }
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

extern "C" __global__ void dependent_multiply_adds(float* out, int steps) {
  float x = 1.0f + out[0];
  const float a = 0.5f + out[0], b = out[0];
  for (int step = 0; step < steps; step += 8) {
#pragma unroll
    for (int k = 0; k < 8; ++k) x = fmaf(x, a, b);
  }
  out[1] = x;
}
