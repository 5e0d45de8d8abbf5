// Attention of heads of 128 without tensor cores: q, k and v in bf16, all arithmetic in fp32.
// Causal: a query attends to the keys up to its own position. blockIdx.y is the head.
//
// scores: writes a tile of scaled scores in fp32. Tiles above the diagonal are skipped.
// softmax: one block per row turns its scores into weights, in place.
// weighted: computes a tile of outputs, the product of weights and values.
// online: does all three for 64 queries. Each tile of scores stays on the chip. A running maximum
// and sum per row correct the outputs.

#include <cuda_bf16.h>

constexpr int WIDTH = 128, TILE = 64, THREADS = 128;  // queries and keys of a tile
constexpr int PITCH = WIDTH + 4, WEIGHTS = TILE + 16;  // row pitch in floats, avoids conflicts
constexpr int ROWS = 8, COLUMNS = 4, OUTPUTS = 8;      // of a thread: 8 x 4 scores, 8 x 8 outputs
constexpr float LOG2E = 1.44269504f;

extern __shared__ float4 memory[];

__device__ float lowest() { return __uint_as_float(0xff800000u); }  // minus infinity

// A thread has rows y, y + 8, ..., scores x, x + 16, ... and outputs 4 x, ... and 64 + 4 x, ...
// The 16 threads of a row are half of a warp.
struct Place {
  int x = threadIdx.x % 16, y = threadIdx.x / 16;
};

// Copies 64 rows of bf16 into shared memory as fp32. Rows from `rows` on become zero.
__device__ void fill(float* tile, const __nv_bfloat16* from, int first, int rows) {
  for (int at = threadIdx.x; at < TILE * WIDTH / 8; at += THREADS) {
    const int row = at / (WIDTH / 8), column = at % (WIDTH / 8) * 8;
    uint4 piece = {};
    if (first + row < rows) {
      const size_t at = static_cast<size_t>(first + row) * WIDTH + column;
      piece = *reinterpret_cast<const uint4*>(&from[at]);
    }
    const unsigned pairs[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // bf16 is the upper half of fp32
      tile[row * PITCH + column + 2 * i] = __uint_as_float(pairs[i] << 16);
      tile[row * PITCH + column + 2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
  }
}

__device__ void multiply(const float* q, const float* k, float (&sums)[ROWS][COLUMNS]) {
  const Place my;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) sums[i][j] = 0;
  }
#pragma unroll 2
  for (int at = 0; at < WIDTH; at += 4) {
    float4 b[COLUMNS];
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      b[j] = *reinterpret_cast<const float4*>(&k[(my.x + 16 * j) * PITCH + at]);
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const float4 a = *reinterpret_cast<const float4*>(&q[(my.y + 8 * i) * PITCH + at]);
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        sums[i][j] += a.x * b[j].x + a.y * b[j].y + a.z * b[j].z + a.w * b[j].w;
      }
    }
  }
}

// Adds the product of 64 x 64 weights and 64 values to the outputs.
__device__ void accumulate(const float* weights, const float* v, float (&out)[ROWS][OUTPUTS]) {
  const Place my;
#pragma unroll 2
  for (int key = 0; key < TILE; key += 4) {
    float b[4][OUTPUTS];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<float4*>(&b[n][4 * half]) =
            *reinterpret_cast<const float4*>(&v[(key + n) * PITCH + 64 * half + 4 * my.x]);
      }
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const float4 a = *reinterpret_cast<const float4*>(&weights[(my.y + 8 * i) * WEIGHTS + key]);
#pragma unroll
      for (int j = 0; j < OUTPUTS; ++j) {
        out[i][j] += a.x * b[0][j] + a.y * b[1][j] + a.z * b[2][j] + a.w * b[3][j];
      }
    }
  }
}

// Writes outputs, each row times its factor.
__device__ void store(const float (&out)[ROWS][OUTPUTS], const float (&factor)[ROWS],
                      __nv_bfloat16* to, int first, int rows) {
  const Place my;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int row = first + my.y + 8 * i;
    if (row >= rows) continue;
#pragma unroll
    for (int j = 0; j < OUTPUTS; j += 2) {
      const int column = j / 4 * 64 + 4 * my.x + j % 4;
      *reinterpret_cast<__nv_bfloat162*>(&to[static_cast<size_t>(row) * WIDTH + column]) =
          __floats2bfloat162_rn(out[i][j] * factor[i], out[i][j + 1] * factor[i]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    scores(const __nv_bfloat16* q, const __nv_bfloat16* k, float* to, int tokens, float scale,
           int causal) {
  float *queries = reinterpret_cast<float*>(memory), *keys = queries + TILE * PITCH;
  const int tiles = (tokens + TILE - 1) / TILE;
  const int first = blockIdx.x / tiles * TILE, start = blockIdx.x % tiles * TILE;
  if (causal && start > first) return;
  const size_t head = blockIdx.y * static_cast<size_t>(tokens);
  fill(queries, q + head * WIDTH, first, tokens);
  fill(keys, k + head * WIDTH, start, tokens);
  __syncthreads();
  float sums[ROWS][COLUMNS];
  multiply(queries, keys, sums);
  const Place my;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int row = first + my.y + 8 * i;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      const int key = start + my.x + 16 * j;
      if (row < tokens && key < tokens) to[(head + row) * tokens + key] = sums[i][j] * scale;
    }
  }
}

// Returns the maximum or the sum over the block, to all its threads.
template <bool sum>
__device__ float reduced(float value) {
  __shared__ float parts[THREADS / 32];
  auto both = [](float a, float b) { return sum ? a + b : fmaxf(a, b); };
  for (int lane = 16; lane; lane /= 2) value = both(value, __shfl_xor_sync(~0u, value, lane));
  __syncthreads();  // the previous parts have been read
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  value = parts[0];
  for (int i = 1; i < THREADS / 32; ++i) value = both(value, parts[i]);
  return value;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    softmax(float* values, int tokens, int causal) {
  const int row = blockIdx.x, seen = causal ? row + 1 : tokens;
  float* mine = values + (blockIdx.y * static_cast<size_t>(tokens) + row) * tokens;
  float most = lowest(), sum = 0;
  for (int at = threadIdx.x; at < seen; at += THREADS) most = fmaxf(most, mine[at]);
  most = reduced<false>(most);
  for (int at = threadIdx.x; at < seen; at += THREADS) sum += exp2f((mine[at] - most) * LOG2E);
  const float factor = 1 / reduced<true>(sum);
  // `weighted` also reads the scores after the diagonal of the last tile.
  const int end = min((seen + TILE - 1) / TILE * TILE, tokens);
  for (int at = threadIdx.x; at < end; at += THREADS) {
    mine[at] = at < seen ? exp2f((mine[at] - most) * LOG2E) * factor : 0.0f;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    weighted(const float* from, const __nv_bfloat16* v, __nv_bfloat16* out, int tokens,
             int causal) {
  float *weights = reinterpret_cast<float*>(memory), *values = weights + TILE * WEIGHTS;
  const int first = blockIdx.x * TILE;
  const size_t head = blockIdx.y * static_cast<size_t>(tokens);
  float sums[ROWS][OUTPUTS] = {}, ones[ROWS];
  const int end = causal ? min(first + TILE, tokens) : tokens;
  for (int start = 0; start < end; start += TILE) {
    for (int at = threadIdx.x; at < TILE * TILE; at += THREADS) {
      const int row = at / TILE, key = at % TILE;
      const bool inside = first + row < tokens && start + key < tokens;
      const size_t source = (head + first + row) * tokens + start + key;
      weights[row * WEIGHTS + key] = inside ? from[source] : 0.0f;
    }
    fill(values, v + head * WIDTH, start, tokens);
    __syncthreads();
    accumulate(weights, values, sums);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i) ones[i] = 1;
  store(sums, ones, out + head * WIDTH, first, tokens);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    online(const __nv_bfloat16* q, const __nv_bfloat16* k, const __nv_bfloat16* v,
           __nv_bfloat16* out, int tokens, float scale, int causal) {
  float *queries = reinterpret_cast<float*>(memory), *tile = queries + TILE * PITCH;
  float* weights = tile + TILE * PITCH;
  const Place my;
  // In a causal head, blocks of later queries have more keys. These long blocks start first.
  const int first = (gridDim.x - 1 - blockIdx.x) * TILE;
  const size_t head = blockIdx.y * static_cast<size_t>(tokens) * WIDTH;
  float sums[ROWS][OUTPUTS] = {}, most[ROWS], total[ROWS] = {};
#pragma unroll
  for (int i = 0; i < ROWS; ++i) most[i] = lowest();
  fill(queries, q + head, first, tokens);
  const int end = causal ? min(first + TILE, tokens) : tokens;
  for (int start = 0; start < end; start += TILE) {
    fill(tile, k + head, start, tokens);
    __syncthreads();
    float part[ROWS][COLUMNS];
    multiply(queries, tile, part);
    __syncthreads();  // the keys have been read
    fill(tile, v + head, start, tokens);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      // Every row attends to the first key, so the maximum is finite from the first tile on.
      const int seen = causal ? min(first + my.y + 8 * i + 1, tokens) : tokens;
      float now = most[i], added = 0;
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        part[i][j] = start + my.x + 16 * j < seen ? part[i][j] * scale : lowest();
        now = fmaxf(now, part[i][j]);
      }
      for (int lane = 8; lane; lane /= 2) now = fmaxf(now, __shfl_xor_sync(~0u, now, lane));
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        const float weight = exp2f((part[i][j] - now) * LOG2E);
        weights[(my.y + 8 * i) * WEIGHTS + my.x + 16 * j] = weight;
        added += weight;
      }
      const float kept = exp2f((most[i] - now) * LOG2E);
      total[i] = total[i] * kept + added;
      most[i] = now;
#pragma unroll
      for (int j = 0; j < OUTPUTS; ++j) sums[i][j] *= kept;
    }
    __syncthreads();
    accumulate(weights, tile, sums);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    for (int lane = 8; lane; lane /= 2) total[i] += __shfl_xor_sync(~0u, total[i], lane);
    total[i] = 1 / total[i];
  }
  store(sums, total, out + head, first, tokens);
}
