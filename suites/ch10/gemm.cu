// c = a b^T in bf16, summed in fp32. a is (m, k), b is (n, k), c is (m, n). Rows begin at multiples
// of 16 bytes. A block of 8 warps computes 128 x 128 of c with mma.sync, 64 of k at a time.
//
// mma_sync: each thread loads 16 bytes at a time into registers and stores them in shared memory.
// cp_async: copies into shared memory without registers, in a ring of three tiles.
// tma: the same ring, filled by the tensor memory accelerator.

#include <cuda_bf16.h>
#include <cuda_pipeline.h>

#include "../tma.cuh"

constexpr int M = 128, N = 128, K = 64, THREADS = 256, STAGES = 3;
constexpr int A_BYTES = M * K * 2, B_BYTES = N * K * 2, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int PIECES = K / 8;            // pieces of 16 bytes in a row of a tile
constexpr int WARP_M = 64, WARP_N = 32;  // a warp's part of the block's tile
constexpr int TILES_M = WARP_M / 16, TILES_N = WARP_N / 8;

// Returns the position of a piece in a tile. Rows are 128 bytes, and the pieces of a row are in the
// order of TMA's 128-byte swizzle. So the eight rows of an 8 x 8 matrix use all banks.
__device__ unsigned place(unsigned row, unsigned piece) {
  return row * 128 + (piece ^ row % 8) * 16;
}

struct Sums {
  float at[TILES_M][TILES_N][4] = {};
};

__device__ void load_matrices(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

__device__ void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Adds this warp's part of the product of two tiles to its sums.
__device__ void multiply(Sums& sums, const unsigned char* a, const unsigned char* b) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned top = warp / (N / WARP_N) * WARP_M, left = warp % (N / WARP_N) * WARP_N;
  const unsigned from_a = shared_address(a), from_b = shared_address(b);
#pragma unroll
  for (unsigned k = 0; k < PIECES; k += 2) {
    unsigned as[TILES_M][4], bs[TILES_N / 2][4];
#pragma unroll
    for (unsigned i = 0; i < TILES_M; ++i) {
      load_matrices(as[i], from_a + place(top + i * 16 + lane % 16, k + lane / 16));
    }
#pragma unroll
    for (unsigned j = 0; j < TILES_N / 2; ++j) {
      const unsigned row = left + j * 16 + lane / 16 * 8 + lane % 8;
      load_matrices(bs[j], from_b + place(row, k + lane / 8 % 2));
    }
#pragma unroll
    for (unsigned i = 0; i < TILES_M; ++i) {
#pragma unroll
      for (unsigned j = 0; j < TILES_N; ++j) {
        multiply_add(sums.at[i][j], as[i], bs[j / 2][j % 2 * 2], bs[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
}

__device__ void store(const Sums& sums, __nv_bfloat16* c, int m, int n) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int top = blockIdx.y * M + warp / (N / WARP_N) * WARP_M + lane / 4;
  const int left = blockIdx.x * N + warp % (N / WARP_N) * WARP_N + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < TILES_M * 2; ++i) {
    const int row = top + i * 8;
#pragma unroll
    for (int j = 0; j < TILES_N; ++j) {
      const int column = left + j * 8;
      if (row < m && column < n) {  // n is a multiple of 8, so both are inside
        const float* sum = &sums.at[i / 2][j][i % 2 * 2];
        *reinterpret_cast<__nv_bfloat162*>(&c[static_cast<size_t>(row) * n + column]) =
            __floats2bfloat162_rn(sum[0], sum[1]);
      }
    }
  }
}

// Calls each(row, piece) for this thread's pieces of a tile of 128 rows. Neighboring threads have
// neighboring pieces.
template <typename Each>
__device__ void pieces(Each each) {
#pragma unroll
  for (unsigned i = 0; i < M * PIECES / THREADS; ++i) {
    const unsigned at = i * THREADS + threadIdx.x;
    each(at / PIECES, at % PIECES);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    mma_sync(const __nv_bfloat16* a, const __nv_bfloat16* b, __nv_bfloat16* c, int m, int n, int k) {
  extern __shared__ unsigned char memory[];
  unsigned char *tile_a = aligned(memory), *tile_b = tile_a + A_BYTES;
  Sums sums;
  auto fill = [k](unsigned char* tile, const __nv_bfloat16* from, int first, int rows, int start) {
    pieces([=](unsigned row, unsigned piece) {
      const int y = first + row, x = start + piece * 8;
      uint4 value = {};
      if (y < rows && x < k) {
        value = *reinterpret_cast<const uint4*>(&from[static_cast<size_t>(y) * k + x]);
      }
      *reinterpret_cast<uint4*>(&tile[place(row, piece)]) = value;
    });
  };
  for (int start = 0; start < k; start += K) {
    fill(tile_a, a, blockIdx.y * M, m, start);
    fill(tile_b, b, blockIdx.x * N, n, start);
    __syncthreads();
    multiply(sums, tile_a, tile_b);
    __syncthreads();
  }
  store(sums, c, m, n);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    cp_async(const __nv_bfloat16* a, const __nv_bfloat16* b, __nv_bfloat16* c, int m, int n, int k) {
  extern __shared__ unsigned char memory[];
  unsigned char* stages = aligned(memory);
  Sums sums;
  const int steps = (k + K - 1) / K;
  auto fill = [k](unsigned char* tile, const __nv_bfloat16* from, int first, int rows, int start) {
    pieces([=](unsigned row, unsigned piece) {
      const int y = first + row, x = start + piece * 8;
      const bool inside = y < rows && x < k;
      const __nv_bfloat16* source = inside ? &from[static_cast<size_t>(y) * k + x] : from;
      __pipeline_memcpy_async(&tile[place(row, piece)], source, 16, inside ? 0 : 16);
    });
  };
  auto load = [&](int step) {
    if (step < steps) {
      unsigned char* stage = stages + step % STAGES * STAGE_BYTES;
      fill(stage, a, blockIdx.y * M, m, step * K);
      fill(stage + A_BYTES, b, blockIdx.x * N, n, step * K);
    }
    __pipeline_commit();  // commits even an empty group, because wait_prior counts groups
  };
  for (int step = 0; step < STAGES - 1; ++step) load(step);
  for (int step = 0; step < steps; ++step) {
    __pipeline_wait_prior(STAGES - 2);
    __syncthreads();  // all threads see this stage, and none reads the previous one
    load(step + STAGES - 1);
    const unsigned char* stage = stages + step % STAGES * STAGE_BYTES;
    multiply(sums, stage, stage + A_BYTES);
  }
  store(sums, c, m, n);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    tma(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, __nv_bfloat16* c,
        int m, int n, int k) {
  extern __shared__ unsigned char memory[];
  __shared__ alignas(8) unsigned long long full[STAGES];
  unsigned char* stages = aligned(memory);
  Sums sums;
  const int steps = (k + K - 1) / K;
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
    load_tile(stage, a, blockIdx.y * M, step * K, barrier);
    load_tile(stage + A_BYTES, b, blockIdx.x * N, step * K, barrier);
  };
  for (int step = 0; step < STAGES - 1; ++step) load(step);
  for (int step = 0; step < steps; ++step) {
    wait_phase(&full[step % STAGES], step / STAGES % 2);
    __syncthreads();  // no thread reads the previous stage anymore
    load(step + STAGES - 1);
    const unsigned char* stage = stages + step % STAGES * STAGE_BYTES;
    multiply(sums, stage, stage + A_BYTES);
  }
  store(sums, c, m, n);
}
