// stamp: write the GPU's own nanosecond counter to at[index].
// chase: follow `next` for `steps` loads that miss the L1, each waiting for the one before; write the
//   cycles of a load to found[0] and where it ended to found[1]. The L2 evicts these lines first.
// watch: read the nanosecond counter for `length` ns, and write to row `index` of found: the first
//   and the last reading, the sum and the longest of the steps of at least `least` ns, and the
//   shortest step above 0.

// Volatile, so that no reading is moved or left out.
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

// Volatile, so that neither a load nor a reading of the clock moves past another.
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
