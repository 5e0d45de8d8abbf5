// chase: pointer chasing. One thread follows `steps` links of a list in global memory, so each load
//   waits for the previous one. It starts where the last launch stopped. `past_l1` bypasses the L1.
// chase_shared: pointer chasing in shared memory, in a list of `links` links.
// read_cached: all blocks repeatedly read the same table of `vectors` 16-byte vectors through the
//   L1. Each thread reads four vectors in each of `rounds` rounds.
// line_latencies: for each of `lines` lines of 128 bytes, the clock cycles of one load from the L2,
//   averaged over a chain of dependent loads of that line. The table must contain zeros.
// dependent_multiply_adds: one chain of `steps` dependent multiply-adds.

constexpr int BLOCK = 1024;
constexpr int LINKS = 4096;
constexpr int CHAIN = 16;

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
  unsigned at = out[0];
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
  if (seen == 1) out[0] = seen;  // never true, but keeps the loads from being optimized away
}

extern "C" __global__ void line_latencies(const unsigned* table, unsigned* cycles, int lines) {
  for (int line = 0; line < lines; ++line) {
    const unsigned* at = table + 32 * line;
    unsigned next = load_past_l1(at);  // now the line is in the L2, and `next` is 0
    long long before = 0;
#pragma unroll 1
    for (int load = 0; load <= CHAIN; ++load) {
      if (load == 1) before = clock64();
      next = load_past_l1(at + next);
    }
    cycles[line] = static_cast<unsigned>(clock64() - before + next) / CHAIN;
  }
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
