// stamp: write the GPU's own nanosecond counter to at[index].
// chase: follow `next` for `steps` loads that miss the L1, each waiting for the one before; write the
//   cycles of a load to found[0] and where it ended to found[1].

extern "C" __global__ void stamp(long long* at, int index) {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  at[index] = static_cast<long long>(now);
}

// Volatile, so that neither a load nor a reading of the clock moves past another.
__device__ long long cycles() {
  long long now;
  asm volatile("mov.u64 %0, %clock64;" : "=l"(now)::"memory");
  return now;
}

__device__ int load_past_l1(const int* at) {
  int value;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

extern "C" __global__ void chase(const int* next, int steps, long long* found) {
  int at = 0;
  const long long start = cycles();
  for (int step = 0; step < steps; ++step) at = load_past_l1(next + at);
  found[0] = (cycles() - start) / steps;
  found[1] = at;
}
