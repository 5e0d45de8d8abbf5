// c = a b^T in bf16, summed in fp32, on the tensor cores of data center Blackwell (tcgen05). a is
// (m, k), b is (n, k), c is (m, n). Rows begin at multiples of 16 bytes. Sums are in tensor memory.
//
// one_block: a block computes 128 x 128.
// block_pair: the two blocks of a cluster compute 256 x 256 with one instruction for both tensor
//     cores. Each block loads its 128 rows of a, and half of b.

#include <cuda_bf16.h>

#include "../cluster.cuh"
#include "../tma.cuh"

constexpr int M = 128, K = 64, STAGES = 4, THREADS = 128;
constexpr int TILE_BYTES = 128 * K * 2, STAGE_BYTES = 2 * TILE_BYTES;  // a, then b

extern __shared__ unsigned char memory[];

// Returns the descriptor of a tile of 128-byte rows in TMA's swizzle. Groups of 8 rows lie 1024
// bytes apart.
__device__ unsigned long long tile_descriptor(const void* tile) {
  return (shared_address(tile) & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 46 | 2ull << 61;
}

template <bool pair>
__device__ void meet() {
  if constexpr (pair) {
    meet_cluster();
  } else {
    __syncthreads();
  }
}

// Allocates tensor memory for `columns` sums in each of 128 lanes. A whole warp must call this, and
// also the function that frees the memory.
template <bool pair>
__device__ void take_tensor_memory(unsigned* where, int columns) {
  if constexpr (pair) {
    asm volatile(
        "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;"
        " tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::"r"(shared_address(where)),
        "r"(columns)
        : "memory");
  } else {
    asm volatile(
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;"
        " tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::"r"(shared_address(where)),
        "r"(columns)
        : "memory");
  }
}

template <bool pair>
__device__ void give_back(unsigned where, int columns) {
  if constexpr (pair) {
    asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(where), "r"(columns));
  } else {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(where), "r"(columns));
  }
}

// Loads a tile. In a pair of blocks, the barrier of the first block counts the bytes of both
// blocks.
template <bool pair>
__device__ void load(void* tile, const CUtensorMap& map, int row, int column,
                     unsigned long long* barrier) {
  if constexpr (pair) {
    const unsigned first = shared_address(barrier) & 0xfeffffff;
    asm volatile(
        "cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.tile"
        ".mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(tile)),
        "l"(&map), "r"(column), "r"(row), "r"(first)
        : "memory");
  } else {
    load_tile(tile, map, row, column, barrier);
  }
}

// sums = a b^T + (add ? sums : 0) over 16 of k. `shape` is the instruction descriptor.
template <bool pair>
__device__ void multiply(unsigned sums, unsigned long long a, unsigned long long b, unsigned shape,
                         int add) {
  if constexpr (pair) {
    asm volatile(
        "{ .reg .pred add; setp.ne.s32 add, %4, 0;"
        " tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, add; }" ::"r"(sums),
        "l"(a), "l"(b), "r"(shape), "r"(add)
        : "memory");
  } else {
    asm volatile(
        "{ .reg .pred add; setp.ne.s32 add, %4, 0;"
        " tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, add; }" ::"r"(sums),
        "l"(a), "l"(b), "r"(shape), "r"(add)
        : "memory");
  }
}

// Arrives at `barrier` when all products issued before this call are done. For a pair, arrives at
// the barriers of both blocks.
template <bool pair>
__device__ void arrive_when_done(unsigned long long* barrier) {
  if constexpr (pair) {
    asm volatile(
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
        " [%0], %1;" ::"r"(shared_address(barrier)),
        "h"(static_cast<unsigned short>(3))
        : "memory");
  } else {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                     shared_address(barrier))
                 : "memory");
  }
}

// Writes the thread's row of results from its lane of tensor memory, 16 sums at a time.
__device__ void store_row(unsigned sums, unsigned short* c, int row, int column, int columns, int m,
                          int n) {
  for (int j = 0; j < columns; j += 16) {
    float found[16];
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x16.b32"
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, [%16];"
        " tcgen05.wait::ld.sync.aligned;"
        : "=f"(found[0]), "=f"(found[1]), "=f"(found[2]), "=f"(found[3]), "=f"(found[4]),
          "=f"(found[5]), "=f"(found[6]), "=f"(found[7]), "=f"(found[8]), "=f"(found[9]),
          "=f"(found[10]), "=f"(found[11]), "=f"(found[12]), "=f"(found[13]), "=f"(found[14]),
          "=f"(found[15])
        : "r"(sums + j)
        : "memory");
    unsigned packed[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
          : "=r"(packed[i])
          : "f"(found[2 * i + 1]), "f"(found[2 * i]));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // 8 results are 16 bytes, and n is a multiple of 8
      if (row < m && column + j + 8 * i < n) {
        *reinterpret_cast<uint4*>(&c[static_cast<size_t>(row) * n + column + j + 8 * i]) = {
            packed[4 * i], packed[4 * i + 1], packed[4 * i + 2], packed[4 * i + 3]};
      }
    }
  }
}

template <bool pair>
__device__ void compute(const CUtensorMap& a, const CUtensorMap& b, unsigned short* c, int m, int n,
                        int k) {
  constexpr int BLOCKS = pair ? 2 : 1, N = 128 * BLOCKS;
  // fp32 sums, bf16 operands with k along their rows, N by M results.
  constexpr unsigned SHAPE = 1u << 4 | 1u << 7 | 1u << 10 | N / 8 << 17 | M * BLOCKS / 16 << 24;
  __shared__ alignas(8) unsigned long long full[STAGES], empty[STAGES], done;
  __shared__ unsigned where;
  unsigned char* ring = aligned(memory);
  const unsigned rank = pair ? rank_in_cluster() : 0;
  const int steps = (k + K - 1) / K;
  const int row = (blockIdx.x / BLOCKS * BLOCKS + rank) * M, column = blockIdx.y * N;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      init_barrier(&full[stage], 1);
      init_barrier(&empty[stage], 1);
    }
    init_barrier(&done, 1);
    fence_barriers();
  }
  __syncwarp();
  if (threadIdx.x < 32) take_tensor_memory<pair>(&where, N);
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  __syncthreads();
  meet<pair>();
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  const unsigned sums = where;
  if (threadIdx.x == 0) {
    auto fill = [&](int step) {
      if (step >= steps) return;
      const int stage = step % STAGES;
      unsigned char* tile = ring + stage * STAGE_BYTES;
      wait_phase(&empty[stage], step / STAGES % 2 ^ 1);  // returns at once in the first round
      if (rank == 0) expect_bytes(&full[stage], STAGE_BYTES * BLOCKS);
      load<pair>(tile, a, row, step * K, &full[stage]);
      load<pair>(tile + TILE_BYTES, b, column + rank * 128, step * K, &full[stage]);
    };
    for (int step = 0; step < STAGES - 1; ++step) fill(step);
    for (int step = 0; step < steps; ++step) {
      if (rank == 0) {
        const int stage = step % STAGES;
        wait_phase(&full[stage], step / STAGES % 2);
        asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
        const unsigned long long from_a = tile_descriptor(ring + stage * STAGE_BYTES);
        const unsigned long long from_b = tile_descriptor(ring + stage * STAGE_BYTES + TILE_BYTES);
#pragma unroll
        for (int i = 0; i < K / 16; ++i) {  // 16 of k are 32 bytes, 2 in a descriptor
          multiply<pair>(sums, from_a + 2 * i, from_b + 2 * i, SHAPE, step || i);
        }
        arrive_when_done<pair>(&empty[stage]);
      }
      fill(step + STAGES - 1);  // waits for the products of the previous step
    }
    if (rank == 0) arrive_when_done<pair>(&done);
  }
  __syncwarp();
  wait_phase(&done, 0);
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  const unsigned lane = threadIdx.x / 32 * 32;  // in tensor memory, a warp reads its own 32 lanes
  store_row(sums + (lane << 16), c, row + threadIdx.x, column, N, m, n);
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  __syncthreads();
  meet<pair>();
  if (threadIdx.x < 32) give_back<pair>(sums, N);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    one_block(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
              __nv_bfloat16* c, int m, int n, int k) {
  compute<false>(a, b, reinterpret_cast<unsigned short*>(c), m, n, k);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS)
    block_pair(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
               __nv_bfloat16* c, int m, int n, int k) {
  compute<true>(a, b, reinterpret_cast<unsigned short*>(c), m, n, k);
}
