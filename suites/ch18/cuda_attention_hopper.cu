// Attention of heads of 128 on Hopper's tensor cores: bf16, sums in fp32. These kernels follow
// cuda_attention_hopper_tma.cu. Causal: a query attends to the keys up to its own position.
// blockIdx.y is the head. A block takes 128 queries, 64 for each of two warpgroups, and 128 keys at
// a time, from the last visible key to the first. So only the first tile needs a mask.
//
// wgmma_tiles: two warpgroups compute, and one of their threads keeps the ring of tiles filled.
//   Scores, weights and outputs run one after another.
// scores_ahead: like wgmma_tiles, but the scores of the next keys are issued together with the
//   outputs of the current keys.
// specialized: like scores_ahead, but a producer warpgroup fills the ring, without block barriers.
// pingpong: like specialized, but the warpgroups take turns on the tensor cores. One warpgroup
// computes weights while the other's products run.
// overlapped: like pingpong, but a warpgroup computes weights while its own output products run.

#include <cuda_bf16.h>

#include "../wgmma.cuh"
#include "head_tiles.cuh"

constexpr int WIDTH = 128, M = 128, N = 128, HALF = 64;  // HALF: queries of a warpgroup
constexpr int WARPGROUP = 128, COMPUTE = 2, STAGES = 2;
constexpr int SLAB = 64, SLAB_BYTES = 128 * SLAB * 2;  // 64 columns of 128 rows, TMA's swizzle
constexpr int TILE_BYTES = WIDTH / SLAB * SLAB_BYTES;  // of queries, keys or values

extern __shared__ unsigned char memory[];

__device__ float lowest() { return __uint_as_float(0xff800000u); }  // minus infinity

__device__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Volatile, so the compiler keeps it after the wait for the product that reads these registers.
__device__ unsigned packed(float low, float high) {
  unsigned both;
  asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Keeps the compiler from reading the sums too early, because wgmma writes them asynchronously.
__device__ void settle(float (&sums)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// The descriptor of a tile whose rows are along k: columns are contiguous, in slabs of 64. The
// stride from slab to slab is SLAB_BYTES, and from 8 rows to the next 8 it is 1024 bytes.
__device__ unsigned long long rows_along_k(const void* tile) {
  const unsigned long long address = __cvta_generic_to_shared(tile);
  return (address & 0x3ffff) >> 4 | SLAB_BYTES / 16ull << 16 | 64ull << 32 | 1ull << 62;
}

#define R4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(d, i) R4(d, i), R4(d, i + 4), R4(d, i + 8), R4(d, i + 12)

// sum += a b over 16 of k. a is in registers: sums rounded to bf16, in the layout of sums. b's rows
// are along k (the last operand 1 means transposed).
__device__ void wgmma_from_registers(float (&sum)[64], const unsigned* a, unsigned long long b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63},"
      " {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
      : R16(sum, 0), R16(sum, 16), R16(sum, 32), R16(sum, 48)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef R4
#undef R16

// Issues the products for the scores of 64 queries and 128 keys, as one group.
__device__ void ask_scores(float (&scores)[64], const unsigned char* q, const unsigned char* k) {
  const unsigned long long from_q = tile_descriptor(q), from_k = tile_descriptor(k);
#pragma unroll
  for (int at = 0; at < WIDTH / 16; ++at) {  // 16 columns are 32 bytes, 2 in a descriptor
    const int offset = at / 4 * (SLAB_BYTES / 16) + at % 4 * 2;
    wgmma(scores, from_q + offset, from_k + offset, at > 0);
  }
  wgmma_commit();
}

// Issues the product of 64 x 128 weights and 128 values, as one group.
__device__ void ask_outputs(float (&out)[64], const unsigned (&weights)[32],
                            const unsigned char* v) {
  const unsigned long long from_v = rows_along_k(v);
#pragma unroll
  for (int at = 0; at < N / 16; ++at) {  // 16 rows are 2048 bytes, 128 in a descriptor
    wgmma_from_registers(out, &weights[4 * at], from_v + 128 * at);
  }
  wgmma_commit();
}

// A thread's state of its two rows: row lane / 4 of the warp's 16, and the row 8 below.
struct Rows {
  float most[2] = {lowest(), lowest()}, total[2] = {};  // `total` is the thread's part of the sum
  float kept[2];  // factors of the sums so far, for the new maximum

  // Turns scores into weights. `scale` is the softmax scale times log2(e).
  __device__ void soften(float (&scores)[64], float scale) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float now = most[i];
#pragma unroll
      for (int j = 2 * i; j < 64; j += 4) now = fmaxf(now, fmaxf(scores[j], scores[j + 1]));
      now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
      now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
      // Each row attends to a key of the first tile it visits, so the maximum is finite.
      const float scaled = now * scale;
      kept[i] = exp2_of(most[i] * scale - scaled);
      most[i] = now;
      float sum = 0;
#pragma unroll
      for (int j = 2 * i; j < 64; j += 4) {
        scores[j] = exp2_of(scores[j] * scale - scaled);
        scores[j + 1] = exp2_of(scores[j + 1] * scale - scaled);
        sum += scores[j] + scores[j + 1];
      }
      total[i] = total[i] * kept[i] + sum;
    }
  }

  // Forces the weights to be computed before the next wait. Without this branch, ptxas moved most
  // exponentials of `overlapped` after the wait for the outputs, so nothing overlapped. The branch
  // is never taken, because a sum of weights is never negative.
  __device__ void finish() const {
    if (total[0] + total[1] < 0) __nanosleep(1);
  }

  __device__ void correct(float (&out)[64]) const {
#pragma unroll
    for (int j = 0; j < 64; ++j) out[j] *= kept[j / 2 % 2];
  }
};

__device__ void round_weights(unsigned (&weights)[32], const float (&scores)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) weights[i] = packed(scores[2 * i], scores[2 * i + 1]);
}

// Masks the keys after each row's position. `row` is the thread's first row.
__device__ void mask(float (&scores)[64], int row, int start, int tokens, int causal) {
#pragma unroll
  for (int j = 0; j < 64; ++j) {
    const int seen = causal ? min(row + j / 2 % 2 * 8 + 1, tokens) : tokens;
    const int key = start + j / 4 * 8 + static_cast<int>(threadIdx.x % 4) * 2 + j % 2;
    if (key >= seen) scores[j] = lowest();
  }
}

// Writes the outputs of rows that exist.
__device__ void store(const float (&out)[64], const Rows& rows, __nv_bfloat16* to, int row,
                      int tokens) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float total = rows.total[i];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const float factor = 1 / total;
    if (row + 8 * i < tokens) {
      __nv_bfloat16* at = to + static_cast<size_t>(row + 8 * i) * WIDTH + threadIdx.x % 4 * 2;
#pragma unroll
      for (int j = 0; j < WIDTH / 8; ++j) {
        *reinterpret_cast<unsigned*>(&at[8 * j]) =
            packed(out[4 * j + 2 * i] * factor, out[4 * j + 2 * i + 1] * factor);
      }
    }
  }
}

// Lane 0 arrives, without a branch, because wgmma needs converged warps.
__device__ void arrive(unsigned long long* barrier) {
  asm volatile(
      "{ .reg .pred p; setp.eq.u32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0]; }" ::"r"(
          shared_address(barrier)),
      "r"(threadIdx.x % 32)
      : "memory");
}

// Lets two warpgroups alternate on the tensor cores. Each waits at its own barrier, at which the
// other warpgroup arrives. Barrier 0 is __syncthreads.
__device__ void wait_turn(int mine) {
  asm volatile("bar.sync %0, 256;" ::"r"(1 + mine) : "memory");
}
__device__ void give_turn(int other) {
  asm volatile("bar.arrive %0, 256;" ::"r"(1 + other) : "memory");
}

struct Barriers {
  unsigned long long q, k[STAGES], v[STAGES];     // tiles have arrived
  unsigned long long no_k[STAGES], no_v[STAGES];  // all warps have read them
};

template <bool ahead, bool producer, bool turns, bool overlap>
__device__ void attend(const CUtensorMap& q, const CUtensorMap& k, const CUtensorMap& v,
                       __nv_bfloat16* out, int tokens, float scale, int causal) {
  __shared__ alignas(8) Barriers barriers;
  unsigned char *queries = aligned(memory), *keys = queries + TILE_BYTES;
  unsigned char* values = keys + STAGES * TILE_BYTES;
  // In a causal head, blocks of later queries have more keys. These long blocks start first.
  const int first = (gridDim.x - 1 - blockIdx.x) * M, head = blockIdx.y;
  const int steps = ((causal ? min(first + M, tokens) : tokens) + N - 1) / N;
  if (threadIdx.x == 0) {
    init_barrier(&barriers.q, 1);
    for (int stage = 0; stage < STAGES; ++stage) {
      init_barrier(&barriers.k[stage], 1);
      init_barrier(&barriers.v[stage], 1);
      init_barrier(&barriers.no_k[stage], COMPUTE * 4);  // each computing warp arrives once
      init_barrier(&barriers.no_v[stage], COMPUTE * 4);
    }
    fence_barriers();
  }
  __syncthreads();
  auto load = [=](unsigned char* to, const CUtensorMap& map, int row, unsigned long long* barrier) {
    expect_bytes(barrier, TILE_BYTES);
    load_head_tile(to, map, head, row, 0, barrier);
    load_head_tile(to + SLAB_BYTES, map, head, row, SLAB, barrier);
  };
  auto load_keys = [&](int step) {
    if (step >= steps) return;
    const int stage = step % STAGES;
    load(keys + stage * TILE_BYTES, k, (steps - 1 - step) * N, &barriers.k[stage]);
  };
  auto load_values = [&](int step) {
    if (step >= steps) return;
    const int stage = step % STAGES;
    load(values + stage * TILE_BYTES, v, (steps - 1 - step) * N, &barriers.v[stage]);
  };
  if (producer && threadIdx.x < WARPGROUP) {
    give_registers<24>();
    if (threadIdx.x == 0) {
      load(queries, q, first, &barriers.q);
      for (int step = 0; step < steps; ++step) {
        const int stage = step % STAGES, parity = step / STAGES % 2 ^ 1;
        wait_phase(&barriers.no_k[stage], parity);  // returns at once in the first round
        load_keys(step);
        wait_phase(&barriers.no_v[stage], parity);
        load_values(step);
      }
    }
    return;
  }
  if constexpr (producer) {
    take_registers<240>();
  } else if (threadIdx.x == 0) {
    load(queries, q, first, &barriers.q);
    for (int step = 0; step < STAGES; ++step) load_keys(step), load_values(step);
  }
  __syncwarp();
  const int mine = threadIdx.x / WARPGROUP - (producer ? 1 : 0);
  const int row = first + mine * HALF + threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4;
  // The tiles of these steps have been read. A step below zero has no tile.
  auto release = [&](int keys_of, int values_of) {
    if constexpr (producer) {
      if (keys_of >= 0) arrive(&barriers.no_k[keys_of % STAGES]);
      if (values_of >= 0) arrive(&barriers.no_v[values_of % STAGES]);
    } else {
      __syncthreads();
      if (threadIdx.x == 0) {
        if (keys_of >= 0) load_keys(keys_of + STAGES);
        if (values_of >= 0) load_values(values_of + STAGES);
      }
      __syncwarp();
    }
  };
  const unsigned char* my_queries = queries + mine * HALF * SLAB * 2;
  float scores[64], sums[64] = {};
  unsigned weights[32];
  Rows rows;
  wait_phase(&barriers.q, 0);
  if constexpr (!ahead) {
    for (int step = 0; step < steps; ++step) {
      const int stage = step % STAGES, parity = step / STAGES % 2;
      wait_phase(&barriers.k[stage], parity);
      wgmma_fence();
      ask_scores(scores, my_queries, keys + stage * TILE_BYTES);
      wgmma_wait<0>();
      settle(scores);
      release(step, -1);
      if (step == 0) mask(scores, row, (steps - 1) * N, tokens, causal);
      rows.soften(scores, scale);
      rows.correct(sums);
      round_weights(weights, scores);
      wait_phase(&barriers.v[stage], parity);
      settle(sums);
      wgmma_fence();
      ask_outputs(sums, weights, values + stage * TILE_BYTES);
      wgmma_wait<0>();
      settle(sums);
      release(-1, step);
    }
    store(sums, rows, out + head * static_cast<size_t>(tokens) * WIDTH, row, tokens);
    return;
  }
  if (turns && mine == 1) give_turn(0);
  wait_phase(&barriers.k[0], 0);
  if (turns) wait_turn(mine);
  wgmma_fence();
  ask_scores(scores, my_queries, keys);
  if (turns) give_turn(1 - mine);
  wgmma_wait<0>();
  settle(scores);
  release(0, -1);
  mask(scores, row, (steps - 1) * N, tokens, causal);
  rows.soften(scores, scale);
  round_weights(weights, scores);
  for (int step = 1; step < steps; ++step) {
    const int stage = step % STAGES, before = (step - 1) % STAGES;
    wait_phase(&barriers.k[stage], step / STAGES % 2);
    if (turns) wait_turn(mine);
    settle(sums);
    wgmma_fence();
    ask_scores(scores, my_queries, keys + stage * TILE_BYTES);
    wait_phase(&barriers.v[before], (step - 1) / STAGES % 2);
    ask_outputs(sums, weights, values + before * TILE_BYTES);
    if (turns) give_turn(1 - mine);
    if constexpr (overlap) {
      wgmma_wait<1>();
      settle(scores);
      release(step, -1);
      rows.soften(scores, scale);
      rows.finish();
      wgmma_wait<0>();
      settle(sums);
      release(-1, step - 1);
    } else {
      wgmma_wait<0>();
      settle(scores);
      settle(sums);
      release(step, step - 1);
      rows.soften(scores, scale);
    }
    rows.correct(sums);
    round_weights(weights, scores);
  }
  const int last = steps - 1;
  wait_phase(&barriers.v[last % STAGES], last / STAGES % 2);
  if (turns) wait_turn(mine);
  settle(sums);
  wgmma_fence();
  ask_outputs(sums, weights, values + last % STAGES * TILE_BYTES);
  if (turns && mine == 0) give_turn(1);
  wgmma_wait<0>();
  settle(sums);
  store(sums, rows, out + head * static_cast<size_t>(tokens) * WIDTH, row, tokens);
}

extern "C" __global__ void __launch_bounds__(COMPUTE* WARPGROUP, 1)
    wgmma_tiles(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                const __grid_constant__ CUtensorMap v, __nv_bfloat16* out, int tokens, float scale,
                int causal) {
  attend<false, false, false, false>(q, k, v, out, tokens, scale, causal);
}

extern "C" __global__ void __launch_bounds__(COMPUTE* WARPGROUP, 1)
    scores_ahead(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                 const __grid_constant__ CUtensorMap v, __nv_bfloat16* out, int tokens, float scale,
                 int causal) {
  attend<true, false, false, false>(q, k, v, out, tokens, scale, causal);
}

extern "C" __global__ void __launch_bounds__((COMPUTE + 1) * WARPGROUP, 1)
    specialized(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                const __grid_constant__ CUtensorMap v, __nv_bfloat16* out, int tokens, float scale,
                int causal) {
  attend<true, true, false, false>(q, k, v, out, tokens, scale, causal);
}

extern "C" __global__ void __launch_bounds__((COMPUTE + 1) * WARPGROUP, 1)
    pingpong(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
             const __grid_constant__ CUtensorMap v, __nv_bfloat16* out, int tokens, float scale,
             int causal) {
  attend<true, true, true, false>(q, k, v, out, tokens, scale, causal);
}

extern "C" __global__ void __launch_bounds__((COMPUTE + 1) * WARPGROUP, 1)
    overlapped(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
               const __grid_constant__ CUtensorMap v, __nv_bfloat16* out, int tokens, float scale,
               int causal) {
  attend<true, true, true, true>(q, k, v, out, tokens, scale, causal);
}
