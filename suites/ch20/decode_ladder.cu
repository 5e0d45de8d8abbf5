// Decodes `count` tokens of one sequence in one kernel. All blocks run at once, which needs a
// cooperative launch. After each phase, all blocks wait for each other. A layer has five phases:
//
//   1. norm, and the product with the weights of queries, keys and values
//   2. rotation, the new entry of the cache, and attention, one block per head
//   3. the product with the output weights, added to x
//   4. norm, the product with gate and up, and SwiGLU
//   5. the product with the down weights, added to x
//
// The last phase of a token is a norm and the LM head. Then each block finds the best token itself.
// In a product, a block computes a range of rows. Its warps share the rows in segments of 1024
// columns. A warp loads a segment of weights while it multiplies another one. Weights do not depend
// on other blocks, so each warp loads two segments of the next product before the barrier. It also
// prefetches up to `prefetched` more segments into the L2, of this product and of the one after it,
// so that DRAM keeps working while blocks wait.
//
// Weights and the inputs of products are bf16, and all sums are fp32.

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <math_constants.h>

constexpr unsigned WARPS = 16, THREADS = 32 * WARPS;
constexpr unsigned LOADS = 4, SEGMENT = 32 * LOADS;  // loads of 16 bytes: per lane, and per warp
constexpr unsigned HEAD = 64, HALF = HEAD / 2;
constexpr unsigned ALL = 0xffffffffu;
constexpr float EPS = 1e-5f;


__device__ unsigned lane() { return threadIdx.x % 32; }
__device__ unsigned warp() { return threadIdx.x / 32; }

__device__ float summed_over_lanes(float total) {
#pragma unroll
  for (unsigned step = 16; step > 0; step /= 2) total += __shfl_xor_sync(ALL, total, step);
  return total;
}

// This block's rows of a product: `rows` rows from `first` on. If `second` is not 0, also as many
// rows from `second + first` on. A unit is one segment of a row.
struct Product {
  const uint4* weights;
  unsigned octets, first, rows, second, segments, units;

  __device__ Product(const uint4* weights, unsigned all_rows, unsigned columns, unsigned second = 0)
      : weights(weights), octets(columns / 8), second(second) {
    first = all_rows * blockIdx.x / gridDim.x;
    rows = all_rows * (blockIdx.x + 1) / gridDim.x - first;
    segments = (octets + SEGMENT - 1) / SEGMENT;
    units = rows * segments * (second ? 2 : 1);
  }
};

// Brings `octets` octets into the L2, without waiting for them.
__device__ void prefetch(const uint4* from, unsigned octets) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(16 * octets));
#else
  for (unsigned i = 0; i < octets; i += 8) {  // a line of the L2 has 8 octets
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i));
  }
#endif
}

// The weights that a lane has loaded ahead, of two units. Up to `prefetched` more units are in the
// L2. `prefetched` is at most 32, because each lane prefetches one unit.
struct Ahead {
  uint4 held[2][LOADS];
  unsigned prefetched;

  __device__ static const uint4* row(const Product& p, unsigned unit) {
    const unsigned local = unit / p.segments;
    const unsigned at = local < p.rows ? local : p.second + local - p.rows;
    return p.weights + size_t(p.first + at) * p.octets;
  }

  __device__ void fetch(unsigned which, const Product& p, unsigned unit) {
    const unsigned octet = unit % p.segments * SEGMENT + lane();
    const uint4* from = row(p, unit);
#pragma unroll
    for (unsigned i = 0; i < LOADS; ++i) {
      const unsigned at = octet + 32 * i;
      if (unit < p.units && at < p.octets) held[which][i] = __ldcs(from + at);
    }
  }

  __device__ static void bring(const Product& p, unsigned unit) {
    const unsigned octet = unit % p.segments * SEGMENT;
    if (unit < p.units) prefetch(row(p, unit) + octet, min(SEGMENT, p.octets - octet));
  }

  // Loads the first units of `p`, and prefetches more of them. If this warp has no more units of
  // `p`, it prefetches units of the next product, whose arguments are those of `Product`.
  __device__ void begin(const Product& p, const uint4* weights, unsigned all_rows, unsigned columns,
                        unsigned second = 0) {
    fetch(0, p, warp());
    fetch(1, p, warp() + WARPS);
    const unsigned turn = 2 + lane();
    const unsigned own = max(2u, p.units > warp() ? (p.units - warp() + WARPS - 1) / WARPS : 0);
    if (lane() >= prefetched) return;
    if (turn < own) {
      bring(p, warp() + turn * WARPS);
    } else {
      bring(Product(weights, all_rows, columns, second), warp() + (turn - own) * WARPS);
    }
  }

  __device__ float times(unsigned which, const Product& p, unsigned unit, const uint4* vector) {
    const unsigned octet = unit % p.segments * SEGMENT + lane();
    float total = 0.0f;
#pragma unroll
    for (unsigned i = 0; i < LOADS; ++i) {
      const unsigned at = octet + 32 * i;
      if (at >= p.octets) continue;
      const uint4 w = held[which][i], x = vector[at];
      const unsigned left[4] = {w.x, w.y, w.z, w.w}, right[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (unsigned j = 0; j < 4; ++j) {  // bf16 is the upper half of fp32
        total = fmaf(__uint_as_float(left[j] << 16), __uint_as_float(right[j] << 16), total);
        total = fmaf(__uint_as_float(left[j] & 0xffff0000u),
                     __uint_as_float(right[j] & 0xffff0000u), total);
      }
    }
    return total;
  }

  // Writes the sum of each unit to `sums`. `begin` has loaded the first units.
  __device__ void multiply(const Product& p, const uint4* vector, float* sums) {
    for (unsigned unit = warp(); unit < p.units; unit += 2 * WARPS) {
#pragma unroll
      for (unsigned which = 0; which < 2; ++which) {
        const unsigned now = unit + which * WARPS;
        if (now >= p.units) break;
        float sum = times(which, p, now, vector);
        fetch(which, p, now + 2 * WARPS);
        sum = summed_over_lanes(sum);
        if (lane() == 0) sums[now] = sum;
      }
    }
    __syncthreads();
  }
};

__device__ float row_sum(const Product& p, unsigned local, const float* sums) {
  float sum = 0.0f;
  for (unsigned i = 0; i < p.segments; ++i) sum += sums[local * p.segments + i];
  return sum;
}

// x, or the embedding before the first layer has written x.
struct Residual {
  const __nv_bfloat16* embedded;
  const float* x;
  __device__ float at(unsigned i) const { return embedded ? __bfloat162float(embedded[i]) : x[i]; }
};

__device__ void normalize(const Residual& x, const __nv_bfloat16* scale, unsigned width,
                          __nv_bfloat16* vector) {
  __shared__ float squares[WARPS];
  float total = 0.0f;
  for (unsigned i = threadIdx.x; i < width; i += THREADS) total = fmaf(x.at(i), x.at(i), total);
  total = summed_over_lanes(total);
  if (lane() == 0) squares[warp()] = total;
  __syncthreads();
  total = 0.0f;
#pragma unroll
  for (unsigned i = 0; i < WARPS; ++i) total += squares[i];
  const float factor = rsqrtf(total / float(width) + EPS);
  for (unsigned i = threadIdx.x; i < width; i += THREADS)
    vector[i] = __float2bfloat16(x.at(i) * factor * __bfloat162float(scale[i]));
  __syncthreads();
}

__device__ void copy(const uint4* from, unsigned columns, uint4* vector) {
  for (unsigned i = threadIdx.x; i < columns / 8; i += THREADS) vector[i] = from[i];
  __syncthreads();
}

// Returns the elements 2 * lane and 2 * lane + 1 of a head, rotated.
__device__ float2 rotated(const float* head, const __nv_bfloat16* cos, const __nv_bfloat16* sin) {
  const unsigned own = 2 * lane(), other = (own + HALF) % HEAD, angle = own % HALF;
  const float sign = own < HALF ? -1.0f : 1.0f;
  float2 out;
  out.x = head[own] * __bfloat162float(cos[angle]) +
          sign * head[other] * __bfloat162float(sin[angle]);
  out.y = head[own + 1] * __bfloat162float(cos[angle + 1]) +
          sign * head[other + 1] * __bfloat162float(sin[angle + 1]);
  return out;
}

// Attention of one head over the keys 0 to `position`. A warp takes every 16th key, and a lane two
// elements of each. `keys` and `values` are this head's cache, and the last entry is not in it yet.
__device__ void attend(const float* query, const float* key, const float* value,
                       const __nv_bfloat16* cos, const __nv_bfloat16* sin, __nv_bfloat162* keys,
                       __nv_bfloat162* values, unsigned position, bool append,
                       __nv_bfloat16* out) {
  __shared__ float best[WARPS], totals[WARPS], sums[WARPS][HEAD];
  const float2 q = rotated(query, cos, sin), turned = rotated(key, cos, sin);
  const __nv_bfloat162 new_key = __floats2bfloat162_rn(turned.x, turned.y);
  const __nv_bfloat162 new_value = __floats2bfloat162_rn(value[2 * lane()], value[2 * lane() + 1]);
  float most = -CUDART_INF_F, total = 0.0f;
  float2 sum = {0.0f, 0.0f};
#pragma unroll 4
  for (unsigned i = warp(); i <= position; i += WARPS) {
    const bool last = i == position;
    const float2 k = __bfloat1622float2(last ? new_key : keys[i * HALF + lane()]);
    const float2 v = __bfloat1622float2(last ? new_value : values[i * HALF + lane()]);
    const float score = summed_over_lanes(q.x * k.x + q.y * k.y) * rsqrtf(float(HEAD));
    const float larger = fmaxf(most, score);
    const float keep = __expf(most - larger), weight = __expf(score - larger);
    total = total * keep + weight;
    sum.x = sum.x * keep + weight * v.x;
    sum.y = sum.y * keep + weight * v.y;
    most = larger;
  }
  if (append && warp() == 0) {
    keys[position * HALF + lane()] = new_key;
    values[position * HALF + lane()] = new_value;
  }
  if (lane() == 0) best[warp()] = most, totals[warp()] = total;
  sums[warp()][2 * lane()] = sum.x, sums[warp()][2 * lane() + 1] = sum.y;
  __syncthreads();
  if (threadIdx.x < HEAD) {
    float all = -CUDART_INF_F, below = 0.0f, above = 0.0f;
    for (unsigned i = 0; i < WARPS; ++i) all = fmaxf(all, best[i]);
    for (unsigned i = 0; i < WARPS; ++i) {
      const float weight = __expf(best[i] - all);  // 0 for a warp without keys
      below += weight * totals[i];
      above += weight * sums[i][threadIdx.x];
    }
    out[threadIdx.x] = __float2bfloat16(above / below);
  }
  __syncthreads();
}

// Returns the first of the largest logits, and its index, in all threads.
__device__ unsigned best_of(const float* logits, unsigned n, float& most) {
  unsigned index = 0;
  most = -CUDART_INF_F;
  for (unsigned i = lane(); i < n; i += 32) {
    if (logits[i] > most) most = logits[i], index = i;
  }
#pragma unroll
  for (unsigned step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(ALL, most, step);
    const unsigned its = __shfl_xor_sync(ALL, index, step);
    if (other > most || (other == most && its < index)) most = other, index = its;
  }
  return index;
}

// `weights` has six addresses per layer: the norm, the weights of queries, keys and values, the
// output weights, the second norm, gate and up, and down. x, qkv, mixed, activated and logits are
// buffers for what blocks give each other. No pointer is __restrict__, because blocks read what
// other blocks wrote in the same kernel. With __restrict__, the compiler could use loads that
// return old values from the L1.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode(const uint4* const* weights, const __nv_bfloat16* embedding,
           const __nv_bfloat16* last_norm, const uint4* lm_head, const __nv_bfloat16* cos,
           const __nv_bfloat16* sin, __nv_bfloat162* keys, __nv_bfloat162* values, float* x,
           float* qkv, __nv_bfloat16* mixed, __nv_bfloat16* activated, float* logits,
           const long long* first_token, long long* tokens, __nv_bfloat16* scores, unsigned layers,
           unsigned width, unsigned kv, unsigned hidden, unsigned vocabulary, unsigned length,
           unsigned position, unsigned count, unsigned prefetched) {
  extern __shared__ uint4 vector[];
  __nv_bfloat16* const elements = reinterpret_cast<__nv_bfloat16*>(vector);
  float* const sums = reinterpret_cast<float*>(vector + max(width, hidden) / 8);
  const cooperative_groups::grid_group grid = cooperative_groups::this_grid();
  const unsigned heads = width / HEAD, kv_heads = kv / HEAD, groups = heads / kv_heads;
  unsigned token = unsigned(*first_token);
  Ahead ahead;
  ahead.prefetched = prefetched;
  ahead.begin(Product(weights[1], width + 2 * kv, width), weights[2], width, width);
  for (unsigned step = 0; step < count; ++step, ++position) {
    const __nv_bfloat16* embedded = embedding + size_t(token) * width;
    for (unsigned layer = 0; layer < layers; ++layer) {
      const uint4* const* of = weights + 6 * layer;
      const Residual before = {layer ? nullptr : embedded, x}, after = {nullptr, x};

      const Product project(of[1], width + 2 * kv, width);
      normalize(before, reinterpret_cast<const __nv_bfloat16*>(of[0]), width, elements);
      ahead.multiply(project, vector, sums);
      for (unsigned i = threadIdx.x; i < project.rows; i += THREADS)
        qkv[project.first + i] = row_sum(project, i, sums);
      const Product output(of[2], width, width);
      ahead.begin(output, of[4], hidden, width, hidden);
      grid.sync();

      for (unsigned head = blockIdx.x; head < heads; head += gridDim.x) {
        const unsigned shared = head / groups;
        const size_t cached = (size_t(layer) * kv_heads + shared) * length * HALF;
        const float* key = qkv + width + shared * HEAD;
        attend(qkv + head * HEAD, key, key + kv, cos + position * HALF, sin + position * HALF,
               keys + cached, values + cached, position, head % groups == 0, mixed + head * HEAD);
      }
      grid.sync();

      copy(reinterpret_cast<const uint4*>(mixed), width, vector);
      ahead.multiply(output, vector, sums);
      for (unsigned i = threadIdx.x; i < output.rows; i += THREADS)
        x[output.first + i] = before.at(output.first + i) + row_sum(output, i, sums);
      const Product gate_up(of[4], hidden, width, hidden);
      ahead.begin(gate_up, of[5], width, hidden);
      grid.sync();

      normalize(after, reinterpret_cast<const __nv_bfloat16*>(of[3]), width, elements);
      ahead.multiply(gate_up, vector, sums);
      for (unsigned i = threadIdx.x; i < gate_up.rows; i += THREADS) {
        const float gate = row_sum(gate_up, i, sums);
        const float up = row_sum(gate_up, gate_up.rows + i, sums);
        activated[gate_up.first + i] = __float2bfloat16(gate / (1.0f + __expf(-gate)) * up);
      }
      const Product down(of[5], width, hidden);
      const bool last = layer + 1 == layers;
      ahead.begin(down, last ? lm_head : of[6 + 1], last ? vocabulary : width + 2 * kv, width);
      grid.sync();

      copy(reinterpret_cast<const uint4*>(activated), hidden, vector);
      ahead.multiply(down, vector, sums);
      for (unsigned i = threadIdx.x; i < down.rows; i += THREADS)
        x[down.first + i] += row_sum(down, i, sums);
      if (last) {
        ahead.begin(Product(lm_head, vocabulary, width), weights[1], width + 2 * kv, width);
      } else {
        ahead.begin(Product(of[6 + 1], width + 2 * kv, width), of[6 + 2], width, width);
      }
      grid.sync();
    }

    const Product head(lm_head, vocabulary, width);
    normalize({nullptr, x}, last_norm, width, elements);
    ahead.multiply(head, vector, sums);
    for (unsigned i = threadIdx.x; i < head.rows; i += THREADS)
      logits[head.first + i] = row_sum(head, i, sums);
    if (step + 1 < count)
      ahead.begin(Product(weights[1], width + 2 * kv, width), weights[2], width, width);
    grid.sync();

    float score;
    token = best_of(logits, vocabulary, score);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      tokens[step] = token;
      scores[step] = __float2bfloat16(score);
    }
  }
}
