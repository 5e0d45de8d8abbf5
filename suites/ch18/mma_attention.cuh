// Shared code of cuda_attention_mma.cu and cuda_attention_hopper_tma.cu: attention of heads of 128
// with mma.sync, like FlashAttention-2: bf16, sums in fp32. Causal: a query attends to the keys up
// to its own position. blockIdx.y is the head. A block of 4 warps takes 128 queries, 32 per warp,
// and 64 keys at a time. The next 64 keys and values are loaded during the computation.

#include <cuda_bf16.h>

#include "head_tiles.cuh"

constexpr int WIDTH = 128, M = 128, N = 64, THREADS = 128, STAGES = 2;
constexpr int SLAB = 64;                         // columns of a tile: 128 bytes, TMA's swizzle
constexpr int SLABS = WIDTH / SLAB, PIECES = 8;  // of 16 bytes in a row of a slab
constexpr int Q_SLAB = M * SLAB * 2, K_SLAB = N * SLAB * 2;
constexpr int Q_BYTES = SLABS * Q_SLAB, K_BYTES = SLABS * K_SLAB, STAGE_BYTES = 2 * K_BYTES;
constexpr int TOP = 2, KEYS = N / 8, OUT = WIDTH / 8;  // of a warp: 2 x 16 rows, 8 columns each

extern __shared__ unsigned char memory[];

__device__ float lowest() { return __uint_as_float(0xff800000u); }  // minus infinity

// Returns the offset of a piece in a slab. The pieces of a row are in the order of TMA's 128-byte
// swizzle.
__device__ unsigned place(unsigned row, unsigned piece) {
  return row * 128 + (piece ^ row % 8) * 16;
}

template <bool transposed>
__device__ void load_matrices(unsigned (&to)[4], unsigned address) {
  if constexpr (transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  }
}

__device__ void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ unsigned packed(float low, float high) {
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A thread's state of its warp's 32 queries. A thread has four rows: lane / 4, and the rows 8, 16
// and 24 below. Of every 8 columns, a thread has two: column 2 (lane % 4) and the next.
struct Rows {
  float out[TOP][OUT][4] = {};
  float most[TOP][2], total[TOP][2] = {};  // `total` is the thread's own part of the row's sum

  __device__ Rows() {
    for (auto& pair : most) pair[0] = pair[1] = lowest();
  }
};

// Adds 64 keys and values. `scale` is the softmax scale times log2(e).
__device__ void attend(Rows& rows, unsigned q, unsigned k, int row, int start, int tokens,
                       float scale, int causal) {
  const unsigned lane = threadIdx.x % 32, top = threadIdx.x / 32 * 32, v = k + K_BYTES;
  float scores[TOP][KEYS][4] = {};
#pragma unroll
  for (unsigned at = 0; at < WIDTH / 16; ++at) {
    const unsigned slab = at / 4, piece = at % 4 * 2;
    unsigned a[TOP][4];
#pragma unroll
    for (unsigned i = 0; i < TOP; ++i) {
      const unsigned query = top + i * 16 + lane % 16;
      load_matrices<false>(a[i], q + slab * Q_SLAB + place(query, piece + lane / 16));
    }
#pragma unroll
    for (unsigned j = 0; j < KEYS; j += 2) {
      unsigned b[4];
      const unsigned key = j * 8 + lane / 16 * 8 + lane % 8;
      load_matrices<false>(b, k + slab * K_SLAB + place(key, piece + lane / 8 % 2));
#pragma unroll
      for (unsigned i = 0; i < TOP; ++i) {
        multiply_add(scores[i][j], a[i], b[0], b[1]);
        multiply_add(scores[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
  if (start + N > tokens || (causal && start + N > row - static_cast<int>(lane / 4) + 1)) {
#pragma unroll
    for (int i = 0; i < TOP * 2; ++i) {
      const int seen = causal ? min(row + i * 8 + 1, tokens) : tokens;
#pragma unroll
      for (int j = 0; j < KEYS * 2; ++j) {
        const int key = start + j / 2 * 8 + static_cast<int>(lane % 4) * 2 + j % 2;
        if (key >= seen) scores[i / 2][j / 2][i % 2 * 2 + j % 2] = lowest();
      }
    }
  }
#pragma unroll
  for (int i = 0; i < TOP * 2; ++i) {
    float now = rows.most[i / 2][i % 2], sum = 0;
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
      now = fmaxf(now, fmaxf(scores[i / 2][j][i % 2 * 2], scores[i / 2][j][i % 2 * 2 + 1]));
    }
    now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
    now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
    // Every row attends to key 0, which is in the first tile. So the maximum is finite.
    const float scaled = now * scale, kept = exp2_of(rows.most[i / 2][i % 2] * scale - scaled);
    rows.most[i / 2][i % 2] = now;
#pragma unroll
    for (int j = 0; j < KEYS * 2; ++j) {
      float& score = scores[i / 2][j / 2][i % 2 * 2 + j % 2];
      score = exp2_of(score * scale - scaled);
      sum += score;
    }
    rows.total[i / 2][i % 2] = rows.total[i / 2][i % 2] * kept + sum;
#pragma unroll
    for (int j = 0; j < OUT * 2; ++j) rows.out[i / 2][j / 2][i % 2 * 2 + j % 2] *= kept;
  }
#pragma unroll
  for (unsigned at = 0; at < N / 16; ++at) {  // 16 keys: a thread's scores are its part of a
    unsigned a[TOP][4];
#pragma unroll
    for (unsigned i = 0; i < TOP; ++i) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const float* from = &scores[i][2 * at + part / 2][part % 2 * 2];
        a[i][part] = packed(from[0], from[1]);
      }
    }
#pragma unroll
    for (unsigned j = 0; j < OUT; j += 2) {
      unsigned b[4];
      const unsigned key = at * 16 + lane % 16, piece = j + lane / 16;
      load_matrices<true>(b, v + piece / 8 * K_SLAB + place(key, piece % 8));
#pragma unroll
      for (unsigned i = 0; i < TOP; ++i) {
        multiply_add(rows.out[i][j], a[i], b[0], b[1]);
        multiply_add(rows.out[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// Writes the outputs of rows that exist. `row` is the thread's first row.
__device__ void store(Rows& rows, __nv_bfloat16* out, int row, int tokens) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < TOP * 2; ++i) {
    float total = rows.total[i / 2][i % 2];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const float factor = 1 / total;
    if (row + i * 8 < tokens) {
      __nv_bfloat16* to = out + static_cast<size_t>(row + i * 8) * WIDTH + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < OUT; ++j) {
        const float* from = &rows.out[i / 2][j][i % 2 * 2];
        *reinterpret_cast<unsigned*>(&to[j * 8]) = packed(from[0] * factor, from[1] * factor);
      }
    }
  }
}

// In a causal head, blocks of later queries have more keys. These long blocks start first.
__device__ int first_query() { return (gridDim.x - 1 - blockIdx.x) * M; }
__device__ int my_row() {
  return first_query() + static_cast<int>(threadIdx.x / 32 * 32 + threadIdx.x % 32 / 4);
}
__device__ int tiles_of_keys(int tokens, int causal) {
  return ((causal ? min(first_query() + M, tokens) : tokens) + N - 1) / N;
}
