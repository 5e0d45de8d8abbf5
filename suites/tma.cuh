// The tensor memory accelerator (TMA): copies tiles between global and shared memory.
//
// A tile in shared memory begins at a multiple of 128 bytes. One thread starts a load, and an
// mbarrier counts the bytes. A thread that has waited for the barrier's phase can read the tile.

struct alignas(64) CUtensorMap {
  unsigned long long opaque[16];
};

__device__ inline unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Returns the first address at which tiles with a swizzle may begin, because a swizzle repeats
// every 1024 bytes. Allocate 1024 bytes more than the tiles need.
__device__ inline unsigned char* aligned(unsigned char* memory) {
  return memory + (-shared_address(memory) & 1023);
}

// Makes `barrier` wait for `count` arrivals per phase. Before other threads or the TMA use it, call
// fence_barriers, and __syncthreads if several threads wait.
__device__ inline void init_barrier(unsigned long long* barrier, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
}

__device__ inline void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives at `barrier`, and makes its current phase wait for `bytes` more bytes.
__device__ inline void expect_bytes(unsigned long long* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// Waits for the end of the phase with this parity: 0 for the first phase, then 1, 0, ...
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

// Loads the tile of `map` that begins at (row, column). Elements outside the tensor become zero,
// but the barrier also counts their bytes.
__device__ inline void load_tile(void* tile, const CUtensorMap& map, int row, int column,
                                 unsigned long long* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(tile)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

// Stores the part of a tile that is inside the tensor. Threads that wrote to the tile must call
// `fence_async` and pass a barrier first.
__device__ inline void store_tile(const CUtensorMap& map, const void* tile, int row, int column) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
      " cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(column), "r"(row), "r"(shared_address(tile))
      : "memory");
}

// Makes this thread's earlier writes to shared memory visible to the TMA.
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Waits until the tiles that this thread stores have been read, so their memory can be reused.
__device__ inline void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
