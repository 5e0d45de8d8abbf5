// The tensor memory accelerator (TMA): tiles between global and shared memory by tensor maps.
//
// A tile in shared memory begins at a multiple of 128 bytes. One thread asks for it, an mbarrier
// counts its bytes, and whoever waits for the barrier's phase sees it.

struct alignas(64) CUtensorMap {
  unsigned long long opaque[16];
};

__device__ inline unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Where tiles with a swizzle may begin: it repeats every 1024 bytes. Ask for as many bytes more.
__device__ inline unsigned char* aligned(unsigned char* memory) {
  return memory + (-shared_address(memory) & 1023);
}

// Makes `barrier` wait for `count` arrivals a phase. Before other threads or the TMA use it:
// fence_barriers, and __syncthreads where more threads than one wait.
__device__ inline void init_barrier(unsigned long long* barrier, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
}

__device__ inline void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives at `barrier` and makes its phase wait for `bytes` more.
__device__ inline void expect_bytes(unsigned long long* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// Waits for the end of the phase of this parity: 0 for the first one, then 1, 0, ...
__device__ inline void wait_phase(unsigned long long* barrier, unsigned parity) {
  unsigned done = 0;
  while (!done) {
    asm volatile(
        "{ .reg .pred p;"
        " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
        " selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

// Reads the tile of `map` that begins at (row, column); what lies outside of the tensor is zero,
// and counts for the barrier like everything else.
__device__ inline void load_tile(void* tile, const CUtensorMap& map, int row, int column,
                                 unsigned long long* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(tile)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

// Writes the part of a tile that lies inside of the tensor. If threads have written to the tile,
// they have passed `fence_async` and a barrier before.
__device__ inline void store_tile(const CUtensorMap& map, const void* tile, int row, int column) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
      " cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(column), "r"(row), "r"(shared_address(tile))
      : "memory");
}

// What threads have written to shared memory becomes visible to the TMA.
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Waits until the tiles that this thread stores have been read: their memory may be reused.
__device__ inline void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
