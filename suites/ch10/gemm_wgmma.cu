// c = a b^T in bf16, summed in fp32, on Hopper's tensor cores. These are the rungs after gemm.cu.
//
// wgmma: like `tma` in gemm.cu, but two warpgroups compute 64 x 128 each, with operands from shared
// memory.
// The rungs after wgmma have a warp that only loads. Each rung has a struct with its settings.

#include <cuda_bf16.h>

#include "../cluster.cuh"
#include "../tma.cuh"
#include "../wgmma.cuh"

constexpr int M = 128, K = 64, HALF = 64;  // HALF: rows of each computing warpgroup
constexpr int WARPGROUP = 128, COMPUTE = 2;
constexpr int A_BYTES = M * K * 2;
constexpr int GROUP = 8;  // rows of tiles that are computed together, for reuse in the L2
constexpr int SLICE = 64, SLICE_BYTES = HALF * SLICE * 2;  // results on their way out

// The rungs with a warp that only loads. Each rung makes one change to the rung before it.
struct Specialized {
  static constexpr int N = 128, STAGES = 3;  // columns of a tile, tiles in the ring
  static constexpr int UNDER_WAY = 0;        // steps whose products may overlap the next step
  static constexpr bool PERSISTENT = false;  // a block computes many tiles
  static constexpr bool GROUPED = false;     // GROUP rows of tiles are computed together
  static constexpr bool BY_TMA = false;      // results are written through shared memory and TMA
  static constexpr int CLUSTER = 1;          // blocks that share b's tile
};
struct BackToBack : Specialized {
  static constexpr int UNDER_WAY = 1;
};
struct Wide : BackToBack {
  static constexpr int N = 256;
};
struct FourTiles : Wide {
  static constexpr int STAGES = 4;
};
struct Persistent : FourTiles {
  static constexpr bool PERSISTENT = true;
};
struct Grouped : Persistent {
  static constexpr bool GROUPED = true;
};
struct Stored : Grouped {
  static constexpr bool BY_TMA = true;
};
struct Multicast : Stored {
  static constexpr int CLUSTER = 2;
};

extern __shared__ unsigned char memory[];

__device__ unsigned packed(float low, float high) {
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Adds the product of 64 rows of a and N rows of b, over 64 of k, as one group.
template <int N>
__device__ void multiply(float (&sums)[N / 2], const unsigned char* a, const unsigned char* b,
                         bool first) {
  const unsigned long long from_a = tile_descriptor(a), from_b = tile_descriptor(b);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < K / 16; ++k) {  // 16 of k are 32 bytes, 2 in a descriptor
    wgmma(sums, from_a + 2 * k, from_b + 2 * k, !first || k);
  }
  wgmma_commit();
}

// Keeps the compiler from moving reads of the sums above this point, because the compiler cannot
// tell that the asynchronous products write the sums. Call this after wgmma_wait<0>.
template <int count>
__device__ void settle(float (&sums)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Writes a warpgroup's 64 x N sums, whose first element is c[row][column].
template <int N>
__device__ void store(const float (&sums)[N / 2], __nv_bfloat16* c, int row, int column, int m, int n) {
  const int thread = threadIdx.x % WARPGROUP, lane = thread % 32;
  row += thread / 32 * 16 + lane / 4;
  column += lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row + 8 * i < m && column + 8 * j < n) {  // n is a multiple of 8
        unsigned* to = reinterpret_cast<unsigned*>(
            &c[static_cast<size_t>(row + 8 * i) * n + column + 8 * j]);
        *to = packed(sums[4 * j + 2 * i], sums[4 * j + 2 * i + 1]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(COMPUTE* WARPGROUP, 2)
    wgmma_tiles(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                __nv_bfloat16* c, int m, int n, int k) {
  constexpr int N = 128, STAGES = 3, STAGE_BYTES = A_BYTES + N * K * 2;
  __shared__ alignas(8) unsigned long long full[STAGES];
  unsigned char* stages = aligned(memory);
  float sums[N / 2];
  const int steps = (k + K - 1) / K, row = blockIdx.y * M, column = blockIdx.x * N;
  const int mine = threadIdx.x / WARPGROUP * HALF;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) init_barrier(&full[stage], 1);
    fence_barriers();
  }
  __syncthreads();
  auto load = [&](int step) {
    if (threadIdx.x != 0 || step >= steps) return;
    unsigned char* stage = stages + step % STAGES * STAGE_BYTES;
    unsigned long long* barrier = &full[step % STAGES];
    expect_bytes(barrier, STAGE_BYTES);
    load_tile(stage, a, row, step * K, barrier);
    load_tile(stage + A_BYTES, b, column, step * K, barrier);
  };
  for (int step = 0; step < STAGES - 1; ++step) load(step);
  for (int step = 0; step < steps; ++step) {
    wait_phase(&full[step % STAGES], step / STAGES % 2);
    __syncthreads();  // no thread reads the previous stage anymore
    load(step + STAGES - 1);
    __syncwarp();  // wgmma needs whole warps
    const unsigned char* stage = stages + step % STAGES * STAGE_BYTES;
    multiply<N>(sums, stage + mine * K * 2, stage + A_BYTES, step == 0);
    wgmma_wait<0>();
  }
  settle(sums);
  store<N>(sums, c, row + mine, column, m, n);
}

// The rungs with a warp that only loads -----------------------------------------------------------

// Returns the tile of turn `turn`. `together` rows of tiles are computed together, column by
// column.
template <int together>
__device__ void place_of(int turn, int rows, int columns, int& row, int& column) {
  const int group = turn / (together * columns), inside = turn % (together * columns);
  const int height = min(rows - group * together, together);
  row = group * together + inside % height;
  column = inside / height;
}

// Lane 0 arrives at the barrier of block `rank` of the cluster. There is no branch, because wgmma
// needs whole warps. The warp has only read, so the arrival does not need release semantics. With
// `.release.cluster`, the arrival would be a fence for all GPU memory, which takes about a
// microsecond per step.
__device__ void arrive_at(unsigned long long* barrier, unsigned rank) {
  asm volatile(
      "{ .reg .b32 there; .reg .pred p; setp.eq.u32 p, %2, 0;"
      " mapa.shared::cluster.u32 there, %0, %1;"
      " @p mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(
          shared_address(barrier)),
      "r"(rank), "r"(threadIdx.x % 32)
      : "memory");
}

__device__ void arrive(unsigned long long* barrier) {
  asm volatile(
      "{ .reg .pred p; setp.eq.u32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0]; }" ::"r"(
          shared_address(barrier)),
      "r"(threadIdx.x % 32)
      : "memory");
}

// Loads a tile into both blocks of the cluster, at the same offset in each block's shared memory.
// Each block's barrier counts the block's bytes.
__device__ void load_tile_for_both(void* tile, const CUtensorMap& map, int row, int column,
                                   unsigned long long* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(tile)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)),
      "h"(static_cast<unsigned short>(3))
      : "memory");
}

// A barrier of one warpgroup. Barrier 0 is __syncthreads.
__device__ void meet_warpgroup() {
  __syncwarp();
  asm volatile("bar.sync %0, 128;" ::"r"(static_cast<int>(threadIdx.x / WARPGROUP + 1)) : "memory");
}

// Writes 64 x N sums through two slices of 64 x 64 in shared memory, in TMA's swizzle.
template <int N>
__device__ void store_by_tma(const float (&sums)[N / 2], unsigned char* slices,
                             const CUtensorMap& c, int row, int column) {
  const unsigned thread = threadIdx.x % WARPGROUP, lane = thread % 32;
  const unsigned mine = thread / 32 * 16 + lane % 16;
#pragma unroll
  for (int slice = 0; slice < N / SLICE; ++slice) {
    unsigned char* to = slices + slice % 2 * SLICE_BYTES;
    // From here on, TMA may still be reading the other slice, but not this one.
    if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    meet_warpgroup();
#pragma unroll
    for (int j = 0; j < SLICE / 8; j += 2) {
      const float* at = &sums[(slice * SLICE / 8 + j) * 4];
      const unsigned piece = (j + lane / 16) ^ mine % 8;
      asm volatile(
          "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
              shared_address(to) + mine * 128 + piece * 16),
          "r"(packed(at[0], at[1])), "r"(packed(at[2], at[3])), "r"(packed(at[4], at[5])),
          "r"(packed(at[6], at[7]))
          : "memory");
    }
    fence_async();
    meet_warpgroup();
    if (thread == 0) store_tile(c, to, row, column + slice * SLICE);
  }
}

template <typename Rung>
__device__ void compute(const CUtensorMap& a, const CUtensorMap& b, const CUtensorMap* to, __nv_bfloat16* c,
                        int m, int n, int k) {
  constexpr int N = Rung::N, stages = Rung::STAGES, cluster = Rung::CLUSTER;
  constexpr int STAGE_BYTES = A_BYTES + N * K * 2;
  __shared__ alignas(8) unsigned long long full[stages], empty[stages];
  unsigned char *ring = aligned(memory), *out = ring + stages * STAGE_BYTES;
  const int steps = (k + K - 1) / K, columns = (n + N - 1) / N;
  // The blocks of a cluster compute neighboring rows of tiles. `rows` counts the pairs of rows.
  const int rows = (m + M * cluster - 1) / (M * cluster);
  const unsigned rank = cluster > 1 ? rank_in_cluster() : 0;
  const int first = blockIdx.x / cluster, stride = gridDim.x / cluster;
  const int turns = Rung::PERSISTENT ? rows * columns : first + 1;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      init_barrier(&full[stage], 1);
      init_barrier(&empty[stage], COMPUTE * 4 * cluster);  // each computing warp arrives once
    }
    fence_barriers();
  }
  if constexpr (cluster > 1) {
    meet_cluster();
  } else {
    __syncthreads();
  }
  auto place = [&](int turn, int& row, int& column) {
    if constexpr (Rung::GROUPED) {
      place_of<GROUP / cluster>(turn, rows, columns, row, column);
    } else {
      row = turn / columns, column = turn % columns;
    }
    row = (row * cluster + rank) * M;
    column *= N;
  };
  if (threadIdx.x >= COMPUTE * WARPGROUP) {
    if (threadIdx.x == COMPUTE * WARPGROUP) {
      int count = 0;
      for (int turn = first; turn < turns; turn += stride) {
        int row, column;
        place(turn, row, column);
        for (int step = 0; step < steps; ++step, ++count) {
          const int stage = count % stages;
          unsigned char* tile = ring + stage * STAGE_BYTES;
          wait_phase(&empty[stage], count / stages % 2 ^ 1);  // returns at once in the first round
          expect_bytes(&full[stage], STAGE_BYTES);
          load_tile(tile, a, row, step * K, &full[stage]);
          if constexpr (cluster > 1) {
            const int half = rank * (N / 2);
            load_tile_for_both(tile + A_BYTES + half * K * 2, b, column + half, step * K,
                               &full[stage]);
          } else {
            load_tile(tile + A_BYTES, b, column, step * K, &full[stage]);
          }
        }
      }
    }
    __syncwarp();
  } else {
    const int mine = threadIdx.x / WARPGROUP;
    auto release = [&](int stage) {
      if constexpr (cluster > 1) {
        for (unsigned block = 0; block < cluster; ++block) arrive_at(&empty[stage], block);
      } else {
        arrive(&empty[stage]);
      }
    };
    float sums[N / 2];
    int count = 0;
    for (int turn = first; turn < turns; turn += stride) {
      for (int step = 0; step < steps; ++step, ++count) {
        const int stage = count % stages;
        const unsigned char* tile = ring + stage * STAGE_BYTES;
        wait_phase(&full[stage], count / stages % 2);
        multiply<N>(sums, tile + mine * HALF * K * 2, tile + A_BYTES, step == 0);
        wgmma_wait<Rung::UNDER_WAY>();
        if (step >= Rung::UNDER_WAY) release((count - Rung::UNDER_WAY) % stages);
      }
      wgmma_wait<0>();
      settle(sums);
      if constexpr (Rung::UNDER_WAY) release((count - 1) % stages);
      int row, column;
      place(turn, row, column);
      if constexpr (Rung::BY_TMA) {
        store_by_tma<N>(sums, out + mine * 2 * SLICE_BYTES, *to, row + mine * HALF, column);
      } else {
        store<N>(sums, c, row + mine * HALF, column, m, n);
      }
    }
    if (Rung::BY_TMA && threadIdx.x % WARPGROUP == 0) wait_stores_read();
    __syncwarp();
  }
  // No block may exit while the other block still writes to the first block's shared memory.
  if constexpr (cluster > 1) meet_cluster();
}

#define THREADS (COMPUTE * WARPGROUP + 32)

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    specialized(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                __nv_bfloat16* c, int m, int n, int k) {
  compute<Specialized>(a, b, nullptr, c, m, n, k);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    back_to_back(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                 __nv_bfloat16* c, int m, int n, int k) {
  compute<BackToBack>(a, b, nullptr, c, m, n, k);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    wide(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
         __nv_bfloat16* c, int m, int n, int k) {
  compute<Wide>(a, b, nullptr, c, m, n, k);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    four_tiles(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
               __nv_bfloat16* c, int m, int n, int k) {
  compute<FourTiles>(a, b, nullptr, c, m, n, k);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    persistent(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
               __nv_bfloat16* c, int m, int n, int k) {
  compute<Persistent>(a, b, nullptr, c, m, n, k);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    grouped(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
            __nv_bfloat16* c, int m, int n, int k) {
  compute<Grouped>(a, b, nullptr, c, m, n, k);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    stored(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
           const __grid_constant__ CUtensorMap c, int m, int n, int k) {
  compute<Stored>(a, b, &c, nullptr, m, n, k);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    multicast(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
              const __grid_constant__ CUtensorMap c, int m, int n, int k) {
  compute<Multicast>(a, b, &c, nullptr, m, n, k);
}
