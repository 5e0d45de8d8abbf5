// Persistent clusters: each cluster processes many rows. While one row is in registers, bulk copies
// load the next rows into shared memory.
//
// The grid is (blocks of a cluster, clusters). Cluster i processes the rows i, i + clusters, and so
// on. A block keeps at most THREADS * PER vectors of a row.

#include "../tma.cuh"
#include "cluster_rows.cuh"

constexpr unsigned MOST_BLOCKS = 8;  // of a cluster

// Copies `bytes`, a multiple of 16, to shared memory. `barrier` counts the bytes as they arrive.
__device__ inline void load_bytes(void* to, const void* from, unsigned bytes,
                                  unsigned long long* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Returns the address of the variable at `p` in the shared memory of block `rank` of the cluster.
__device__ inline unsigned address_in(unsigned rank, const void* p) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
  return there;
}

// Stores `value` at `to` in the shared memory of block `rank`. That block's `barrier` counts the
// bytes as they arrive.
__device__ inline void push(unsigned rank, float* to, float value, unsigned long long* barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
          address_in(rank, to)),
      "f"(value), "r"(address_in(rank, barrier))
      : "memory");
}

__device__ inline void push(unsigned rank, Exponentials* to, Exponentials value,
                            unsigned long long* barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          address_in(rank, to)),
      "f"(value.most), "f"(value.total), "r"(address_in(rank, barrier))
      : "memory");
}

// A block's slices of its rows, as a ring buffer. `Value` is the type that the blocks of a row
// exchange.
template <typename Value, unsigned THREADS, unsigned PER, unsigned STAGES>
class Ring {
 public:
  struct Shared {
    unsigned long long full[STAGES], arrived[2];
    Value part[THREADS / 32], inbox[2][MOST_BLOCKS];
  };
  const Slice part;  // the block's slice of its first row

  // Starts the copies of the first rows. `stages` has room for STAGES * THREADS * PER vectors.
  __device__ Ring(Shared& shared, uint4* stages, const uint4* x, unsigned vectors, unsigned rows)
      : part(slice(vectors)), shared(shared), stages(stages), x(x), vectors(vectors), rows(rows) {
    if (threadIdx.x == 0) {
      for (auto& barrier : shared.full) init_barrier(&barrier, 1);
      for (auto& barrier : shared.arrived) init_barrier(&barrier, 1);
      fence_barriers();
    }
    cooperative_groups::this_cluster().sync();
    for (unsigned turn = 0; turn < STAGES; ++turn) fetch(turn);
  }

  // A block exits only after the other blocks have sent all their values to it.
  __device__ ~Ring() { cooperative_groups::this_cluster().sync(); }

  // Waits for this turn's row, and loads the thread's vectors. A vector past the end of the slice
  // is `none`.
  __device__ void take(uint4 (&v)[PER], unsigned turn, uint4 none) const {
    wait_phase(&shared.full[turn % STAGES], turn / STAGES % 2);
#pragma unroll
    for (unsigned k = 0; k < PER; ++k) {
      v[k] = none;
      if (holds(k)) v[k] = stage(turn)[index(k)];
    }
  }

  // Reduces `value` over the row as `over_lanes` does, returns the result to every thread, and
  // starts the copy of a later row. With PUSHED, each block sends its value with st.async and waits
  // only for the other blocks' values. Without PUSHED, a block waits at the cluster's barrier.
  template <bool PUSHED>
  __device__ Value over_row(Value value, unsigned turn) const {
    constexpr unsigned WARPS = THREADS / 32;
    const unsigned lane = threadIdx.x % 32, blocks = gridDim.x;
    value = over_lanes(value, 32);
    if (lane == 0) shared.part[threadIdx.x / 32] = value;
    __syncthreads();  // from here on, all threads have their vectors in registers
    fetch(turn + STAGES);
    Value* inbox = shared.inbox[turn % 2];  // a block may be one row ahead of another
    unsigned long long* arrived = &shared.arrived[turn % 2];
    if (threadIdx.x < 32) {
      if (PUSHED && lane == 0) expect_bytes(arrived, blocks * sizeof(Value));
      value = over_lanes(shared.part[lane % WARPS], WARPS);
      if (lane < blocks) {
        if constexpr (PUSHED) {
          push(lane, &inbox[blockIdx.x], value, arrived);
        } else {
          *cooperative_groups::this_cluster().map_shared_rank(&inbox[blockIdx.x], lane) = value;
        }
      }
    }
    if constexpr (PUSHED) {
      // This wait has acquire semantics for the block only, which is enough for its own shared
      // memory. A wait at cluster scope would also invalidate the L1.
      wait_phase(arrived, turn / 2 % 2);
    } else {
      cooperative_groups::this_cluster().sync();
    }
    return over_lanes(inbox[lane % blocks], blocks);
  }

  // Returns the position of this thread's vector k in the slice. `holds` tells whether that vector
  // exists.
  __device__ unsigned index(unsigned k) const { return threadIdx.x + k * THREADS; }
  __device__ bool holds(unsigned k) const { return index(k) < part.count; }

  // Returns the block's slice of this turn's row. It is valid until `over_row` of the same turn.
  __device__ uint4* stage(unsigned turn) const { return stages + turn % STAGES * THREADS * PER; }

  // Returns where the block's slice of a row begins in x, in vectors.
  __device__ size_t begin(unsigned row) const {
    return static_cast<size_t>(row) * vectors + part.begin;
  }

 private:
  // Starts the copy for a turn. A thread of the second warp starts it, because the first warp is
  // busy with the exchange.
  __device__ void fetch(unsigned turn) const {
    const unsigned row = blockIdx.y + turn * gridDim.y;
    if (threadIdx.x == 32 && row < rows) {
      unsigned long long* full = &shared.full[turn % STAGES];
      expect_bytes(full, 16 * part.count);
      if (part.count > 0) {
        load_bytes(stage(turn), x + begin(row), 16 * part.count, full);
      }
    }
    __syncwarp();
  }

  Shared& shared;
  uint4* stages;
  const uint4* x;
  unsigned vectors, rows;
};
