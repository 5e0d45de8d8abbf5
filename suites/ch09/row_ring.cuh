// Clusters that stay: each takes row after row. While it has one row in registers, bulk copies
// bring the next ones to its shared memory.
//
// The grid is (blocks of a cluster, clusters). Cluster i takes the rows i, i + clusters, and so on.
// A block keeps at most THREADS * PER vectors of a row.

#include "../tma.cuh"
#include "cluster_rows.cuh"

constexpr unsigned MOST_BLOCKS = 8;  // of a cluster

// Copies `bytes`, a multiple of 16, to shared memory. `barrier` counts them when they are there.
__device__ inline void load_bytes(void* to, const void* from, unsigned bytes,
                                  unsigned long long* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// The address of the same variable in the shared memory of block `rank` of the cluster.
__device__ inline unsigned address_in(unsigned rank, const void* p) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
  return there;
}

// Stores `value` to the `to` of block `rank`. Its `barrier` counts the bytes when they are there.
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

// What a block has of its rows. `Value` is what the blocks of a row exchange.
template <typename Value, unsigned THREADS, unsigned PER, unsigned STAGES>
class Ring {
 public:
  struct Shared {
    unsigned long long full[STAGES], arrived[2];
    Value part[THREADS / 32], inbox[2][MOST_BLOCKS];
  };
  const Slice part;  // of the row of the first turn

  // Asks for the first rows. `stages` has room for STAGES * THREADS * PER vectors.
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

  // A block leaves only when the others have sent it all that they will.
  __device__ ~Ring() { cooperative_groups::this_cluster().sync(); }

  // Waits for the row of this turn, and loads the thread's vectors. The last may be `none`.
  __device__ void take(uint4 (&v)[PER], unsigned turn, uint4 none) const {
    wait_phase(&shared.full[turn % STAGES], turn / STAGES % 2);
#pragma unroll
    for (unsigned k = 0; k < PER; ++k) {
      v[k] = none;
      if (holds(k)) v[k] = stage(turn)[index(k)];
    }
  }

  // Returns the result of `over_lanes` over the row to every thread, and asks for a later row.
  // PUSHED: each block stores its value to the others, and waits only for theirs. If not, it waits
  // at the cluster's barrier.
  template <bool PUSHED>
  __device__ Value over_row(Value value, unsigned turn) const {
    constexpr unsigned WARPS = THREADS / 32;
    const unsigned lane = threadIdx.x % 32, blocks = gridDim.x;
    value = over_lanes(value, 32);
    if (lane == 0) shared.part[threadIdx.x / 32] = value;
    __syncthreads();  // also: all threads have their vectors in registers
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
      // This acquires for the block alone, which is enough for its own shared memory. A wait that
      // acquires for the cluster would also drop what the L1 holds.
      wait_phase(arrived, turn / 2 % 2);
    } else {
      cooperative_groups::this_cluster().sync();
    }
    return over_lanes(inbox[lane % blocks], blocks);
  }

  // Which vector of the slice is vector k of this thread, and whether the slice has it.
  __device__ unsigned index(unsigned k) const { return threadIdx.x + k * THREADS; }
  __device__ bool holds(unsigned k) const { return index(k) < part.count; }

  // The block's slice of a row, until `over_row` of its turn.
  __device__ uint4* stage(unsigned turn) const { return stages + turn % STAGES * THREADS * PER; }

  // Where the block's slice of a row begins, in vectors.
  __device__ size_t begin(unsigned row) const {
    return static_cast<size_t>(row) * vectors + part.begin;
  }

 private:
  // One thread asks, of the second warp, because the first has the exchange to do.
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
