// c = (a b^T) times scales, a (m, k) and b (n, k) in e4m3, c (m, n) in bf16, on Hopper's tensor cores.
// Rows begin at multiples of 16 bytes. The loop is the same as in `stored` and `multicast` of
// ../ch10/gemm_wgmma.cu: one block per SM takes tile after tile. A warp fills a ring by TMA, two
// warpgroups multiply 64 rows each, and the results leave through shared memory.
//
// by_rows: a scale for each row of a and of b. Tensor cores sum over all of k.
// summed: CUDA cores add up the sums over 128 of k.
// by_blocks: like summed, but CUDA cores also multiply each sum by the scales of its blocks.

#include <cuda_bf16.h>

#include "../cluster.cuh"
#include "../tma.cuh"
#include "../wgmma.cuh"

constexpr int M = 128, K = 128, HALF = 64;  // HALF: rows of each computing warpgroup
constexpr int WARPGROUP = 128, COMPUTE = 2;
constexpr int A_BYTES = M * K;
constexpr int GROUP = 8;  // rows of tiles that are taken together, for reuse in the L2
constexpr int SLICE = 64, SLICE_BYTES = HALF * SLICE * 2;  // results on their way to memory

struct ByRows {
  static constexpr int N = 256, STAGES = 4;  // columns of a tile, tiles in the ring
  static constexpr int CLUSTER = 1;          // blocks that share b's tile
  static constexpr bool SUMMED = false, BLOCKS = false;
};
// Two sets of sums need twice the registers, so a tile has half the columns. Then two blocks share
// b's tile, so that each result costs no more bytes from the L2 than in ByRows.
struct Summed {
  static constexpr int N = 128, STAGES = 6, CLUSTER = 2;
  static constexpr bool SUMMED = true, BLOCKS = false;
};
struct ByBlocks : Summed {
  static constexpr bool BLOCKS = true;
};

extern __shared__ unsigned char memory[];

#define R4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(d, i) R4(d, i), R4(d, i + 4), R4(d, i + 8), R4(d, i + 12)
#define R64(d, i) R16(d, i), R16(d, i + 16), R16(d, i + 32), R16(d, i + 48)

// sum = a b^T + (add ? sum : 0) over 32 of k, for 64 rows of a and 128 or 256 rows of b.
__device__ void wgmma_e4m3(float (&sum)[64], unsigned long long a, unsigned long long b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %66, 0;"
      " wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63},"
      " %64, %65, p, 1, 1; }"
      : R64(sum, 0)
      : "l"(a), "l"(b), "r"(add));
}

__device__ void wgmma_e4m3(float (&sum)[128], unsigned long long a, unsigned long long b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %130, 0;"
      " wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3"
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"
      " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,"
      " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95,"
      " %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111,"
      " %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127},"
      " %128, %129, p, 1, 1; }"
      : R64(sum, 0), R64(sum, 64)
      : "l"(a), "l"(b), "r"(add));
}

#undef R4
#undef R16
#undef R64

// Adds the product of 64 rows of a and N rows of b, over 128 of k, as one group.
template <int N>
__device__ void multiply(float (&sums)[N / 2], const unsigned char* a, const unsigned char* b,
                         bool first) {
  const unsigned long long from_a = tile_descriptor(a), from_b = tile_descriptor(b);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < K / 32; ++k) {  // 32 of k are 32 bytes, 2 in a descriptor
    wgmma_e4m3(sums, from_a + 2 * k, from_b + 2 * k, !first || k);
  }
  wgmma_commit();
}

// Keeps the compiler from reading the sums too early, because wgmma writes them asynchronously.
// Call this after wgmma_wait<0>.
template <int count>
__device__ void settle(float (&sums)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

__device__ unsigned packed(float low, float high) {
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Returns the tile of turn `turn`. `together` rows of tiles are taken together, column by column.
template <int together>
__device__ void place_of(int turn, int rows, int columns, int& row, int& column) {
  const int group = turn / (together * columns), inside = turn % (together * columns);
  const int height = min(rows - group * together, together);
  row = group * together + inside % height;
  column = inside / height;
}

// Lane 0 arrives at the barrier of block `rank` of the cluster, without a branch: wgmma needs whole
// warps. The warp has only read, so the arrival makes no writes visible.
__device__ void arrive_at(unsigned long long* barrier, unsigned rank) {
  asm volatile(
      "{ .reg .b32 there; .reg .pred p; setp.eq.u32 p, %2, 0;"
      " mapa.shared::cluster.u32 there, %0, %1;"
      " @p mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(barrier)),
      "r"(rank), "r"(threadIdx.x % 32)
      : "memory");
}

// Loads a tile into both blocks of the cluster, at the same place in each. Each block's barrier
// counts the bytes of its own tile.
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
    // After this wait, TMA may still read the other slice, but not this one.
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

// Multiplies a warpgroup's sums by the scales of their rows and columns. The first sum is
// c[row][column].
template <int N>
__device__ void scale_rows(float (&sums)[N / 2], const float* a_scales, const float* b_scales,
                           int row, int column, int m, int n) {
  const int thread = threadIdx.x % WARPGROUP, lane = thread % 32;
  row += thread / 32 * 16 + lane / 4;
  column += lane % 4 * 2;
  const float upper = row < m ? a_scales[row] : 0, lower = row + 8 < m ? a_scales[row + 8] : 0;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    // n is a multiple of 8. Without a branch, a column's loads need not wait for earlier loads.
    const bool inside = column + 8 * j < n;
    const float left = inside ? b_scales[column + 8 * j] : 0;
    const float right = inside ? b_scales[column + 8 * j + 1] : 0;
    sums[4 * j] *= upper * left, sums[4 * j + 1] *= upper * right;
    sums[4 * j + 2] *= lower * left, sums[4 * j + 3] *= lower * right;
  }
}

template <typename Form>
__device__ void compute(const CUtensorMap& a, const CUtensorMap& b, const CUtensorMap& c,
                        const float* a_scales, const float* b_scales, int m, int n, int k) {
  constexpr int N = Form::N, stages = Form::STAGES, cluster = Form::CLUSTER;
  constexpr int STAGE_BYTES = A_BYTES + N * K;
  __shared__ alignas(8) unsigned long long full[stages], empty[stages];
  unsigned char *ring = aligned(memory), *out = ring + stages * STAGE_BYTES;
  const int steps = (k + K - 1) / K, columns = (n + N - 1) / N;
  // The blocks of a cluster take neighboring rows of tiles. `rows` counts such pairs.
  const int rows = (m + M * cluster - 1) / (M * cluster);
  const unsigned rank = cluster > 1 ? rank_in_cluster() : 0;
  const int first = blockIdx.x / cluster, stride = gridDim.x / cluster, turns = rows * columns;
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
    place_of<GROUP / cluster>(turn, rows, columns, row, column);
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
            load_tile_for_both(tile + A_BYTES + half * K, b, column + half, step * K, &full[stage]);
          } else {
            load_tile(tile + A_BYTES, b, column, step * K, &full[stage]);
          }
        }
      }
    }
    __syncwarp();
  } else {
    const int mine = threadIdx.x / WARPGROUP;
    const int my_row = mine * HALF + threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4;
    auto release = [&](int stage) {
      for (unsigned block = 0; block < cluster; ++block) arrive_at(&empty[stage], block);
    };
    auto finish = [&](float(&results)[N / 2], int row, int column) {
      if constexpr (!Form::BLOCKS) {
        scale_rows<N>(results, a_scales, b_scales, row + mine * HALF, column, m, n);
      }
      store_by_tma<N>(results, out + mine * 2 * SLICE_BYTES, c, row + mine * HALF, column);
    };
    float sums[N / 2];
    int count = 0;
    for (int turn = first; turn < turns; turn += stride) {
      int row, column;
      place(turn, row, column);
      float total[Form::SUMMED ? N / 2 : 1] = {};
      for (int step = 0; step < steps; ++step, ++count) {
        const int stage = count % stages;
        const unsigned char* tile = ring + stage * STAGE_BYTES;
        float upper = 1, lower = 1;
        if constexpr (Form::BLOCKS) {
          static_assert(N == K, "a tile has one scale of b per step");
          const float* scales = a_scales + static_cast<size_t>(step) * m + row + my_row;
          const float of_b = b_scales[column / K * steps + step];
          upper = row + my_row < m ? of_b * scales[0] : 0;
          lower = row + my_row + 8 < m ? of_b * scales[8] : 0;
        }
        wait_phase(&full[stage], count / stages % 2);
        multiply<N>(sums, tile + mine * HALF * K, tile + A_BYTES, Form::SUMMED || step == 0);
        if constexpr (Form::SUMMED) {
          wgmma_wait<0>();
          settle(sums);
          release(stage);
#pragma unroll
          for (int i = 0; i < N / 2; ++i) total[i] += (i % 4 < 2 ? upper : lower) * sums[i];
        } else {
          wgmma_wait<1>();  // the products of this step may overlap with the next step
          if (step > 0) release((count - 1) % stages);
        }
      }
      if constexpr (Form::SUMMED) {
        finish(total, row, column);
      } else {
        wgmma_wait<0>();
        settle(sums);
        release((count - 1) % stages);
        finish(sums, row, column);
      }
    }
    if (threadIdx.x % WARPGROUP == 0) wait_stores_read();
    __syncwarp();
  }
  // No block may exit while the other block still writes to the first block's shared memory.
  if constexpr (cluster > 1) meet_cluster();
}

#define THREADS (COMPUTE * WARPGROUP + 32)

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    by_rows(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
            const __grid_constant__ CUtensorMap c, const float* a_scales, const float* b_scales,
            int m, int n, int k) {
  compute<ByRows>(a, b, c, a_scales, b_scales, m, n, k);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    summed(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
           const __grid_constant__ CUtensorMap c, const float* a_scales, const float* b_scales,
           int m, int n, int k) {
  compute<Summed>(a, b, c, a_scales, b_scales, m, n, k);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    by_blocks(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
              const __grid_constant__ CUtensorMap c, const float* a_scales, const float* b_scales,
              int m, int n, int k) {
  compute<ByBlocks>(a, b, c, a_scales, b_scales, m, n, k);
}
