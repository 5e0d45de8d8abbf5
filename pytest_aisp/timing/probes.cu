// stamp: write the GPU's own nanosecond counter to at[index].
// chase: pointer chasing. Follow `next` for `steps` dependent loads that bypass the L1. Write the
//   cycles per load to found[0], and the last position to found[1]. The L2 evicts these lines
//   first.
// watch: read the nanosecond counter repeatedly for `length` ns. A step is the difference between
//   two successive readings. Write five values to row `index` of `found`: the first reading, the
//   last reading, the sum of all steps of at least `least` ns, the longest step, and the shortest
//   step above 0.

// Volatile: the compiler must neither move nor remove a reading.
__device__ long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  return static_cast<long long>(now);
}

extern "C" __global__ void stamp(long long* at, int index) { at[index] = nanoseconds(); }

extern "C" __global__ void watch(long long* found, int index, int length, int least) {
  const long long start = nanoseconds();
  long long last = start, lost = 0, longest = 0, shortest = length;
  while (last - start < length) {
    const long long now = nanoseconds();
    const long long step = now - last;
    if (step >= least) lost += step;
    if (step > longest) longest = step;
    if (step > 0 && step < shortest) shortest = step;
    last = now;
  }
  long long* row = found + 5 * index;
  row[0] = start;
  row[1] = last;
  row[2] = lost;
  row[3] = longest;
  row[4] = shortest;
}

// Volatile: the compiler must keep the order of the loads and the clock readings.
__device__ long long cycles() {
  long long now;
  asm volatile("mov.u64 %0, %clock64;" : "=l"(now)::"memory");
  return now;
}

__device__ int load_past_l1(const int* at, unsigned long long policy) {
  int value;
  asm volatile("ld.global.cg.L2::cache_hint.s32 %0, [%1], %2;"
               : "=r"(value)
               : "l"(at), "l"(policy)
               : "memory");
  return value;
}

extern "C" __global__ void chase(const int* next, int steps, long long* found) {
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  int at = 0;
  const long long start = cycles();
  for (int step = 0; step < steps; ++step) at = load_past_l1(next + at, policy);
  found[0] = (cycles() - start) / steps;
  found[1] = at;
}
