// Cross entropy of bf16 logits: the loss of each row, and the gradient of the mean of all losses.
//
// clustered: the blocks of a cluster share a row and keep it in their shared memory, so the row is
//   read from DRAM once. The blocks read each other's maxima and sums from shared memory.
// ring: a cluster processes many rows, while bulk copies load the next rows. The blocks wait at the
//   cluster's barrier once per row.
// pushed: like ring, but the blocks send their maxima and sums to each other, and wait only for
//   these values.
//
// Exponentials are powers of 2. For the gradient, log2(1 / rows) is part of the exponent. So an
// element of the gradient takes one multiply-add, one exponential and one rounding. Only the
// label's element needs more instructions.
//
// Rows begin at multiples of 16 bytes, which are 8 logits.

#include <cuda_bf16.h>

#include "row_ring.cuh"

constexpr float LN2 = 0.693147182f;
constexpr unsigned AT_ONCE = 4;  // vectors that a thread of clustered processes at a time
constexpr uint4 NO_LOGITS{0xff80ff80, 0xff80ff80, 0xff80ff80, 0xff80ff80};  // 8 times -inf

// 8 logits, as pairs of 4 bytes.
union Vector {
  uint4 bytes;
  __nv_bfloat162 pair[4];
};

__device__ __nv_bfloat162 most_of(uint4 bytes) {
  const Vector x{bytes};
  return __hmax2(__hmax2(x.pair[0], x.pair[1]), __hmax2(x.pair[2], x.pair[3]));
}

// Returns exp2(x * LOG2E + bias) for both logits of a pair.
__device__ float2 raised(__nv_bfloat162 pair, float bias) {
  const float2 x = __bfloat1622float2(pair);
  return {exp2f(fmaf(x.x, LOG2E, bias)), exp2f(fmaf(x.y, LOG2E, bias))};
}

template <unsigned COUNT>
__device__ Exponentials exponentials(const uint4 (&vectors)[COUNT]) {
  __nv_bfloat162 two = most_of(vectors[0]);
#pragma unroll
  for (unsigned k = 1; k < COUNT; ++k) two = __hmax2(two, most_of(vectors[k]));
  const float2 largest = __bfloat1622float2(two);
  const float most = fmaxf(fmaxf(largest.x, largest.y) * LOG2E, LOWEST);
  float sum[4] = {};
#pragma unroll
  for (unsigned k = 0; k < COUNT; ++k) {
    const Vector x{vectors[k]};
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      const float2 value = raised(x.pair[i], -most);
      sum[i] += value.x + value.y;
    }
  }
  return {most, (sum[0] + sum[1]) + (sum[2] + sum[3])};
}

__device__ Exponentials together(Exponentials a, Exponentials b) {
  const float most = fmaxf(a.most, b.most);
  return {most, a.total * exp2f(a.most - most) + b.total * exp2f(b.most - most)};
}

// The values of a row from which its loss and its gradient are computed. The logarithms are to base
// 2.
struct Row {
  float log_sum, share, bias;

  __device__ Row(Exponentials all, unsigned rows)
      : log_sum(all.most + __log2f(all.total)),
        share(1.0f / static_cast<float>(rows)),
        bias(__log2f(share) - log_sum) {}

  // Returns exp(x - sum) * share, the gradient at each logit but the label's.
  __device__ uint4 gradient(uint4 bytes) const {
    Vector x{bytes};
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) x.pair[i] = __float22bfloat162_rn(raised(x.pair[i], bias));
    return x.bytes;
  }

  // Stores the loss, and the gradient at the label. The caller has already stored the label's
  // vector, and the compiler keeps the order of these two stores.
  __device__ void store_label(float logit, float* loss, uint4* grad, unsigned label) const {
    asm volatile("" ::: "memory");
    *loss = log_sum * LN2 - logit;
    reinterpret_cast<__nv_bfloat16*>(grad)[label] =
        __float2bfloat16_rn(exp2f(fmaf(logit, LOG2E, bias)) - share);
  }
};

// Returns the index of a row's label, counted from the first logit of the slice. If the label is
// before the slice, the result is larger than every index of the slice.
__device__ unsigned label_of(const long long* labels, unsigned row, const Slice& part) {
  return static_cast<unsigned>(labels[row]) - 8 * part.begin;
}

// Returns whether this thread of the block has the vector that contains the label.
__device__ bool has(unsigned label, const Slice& part, unsigned threads) {
  return label / 8 < part.count && label / 8 % threads == threadIdx.x;
}

__device__ float logit_at(const uint4* slice, unsigned label) {
  return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(slice)[label]);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
    clustered(const uint4* __restrict__ logits, const long long* __restrict__ labels,
              float* __restrict__ losses, uint4* __restrict__ grad, unsigned n) {
  extern __shared__ uint4 kept[];
  const auto cluster = cooperative_groups::this_cluster();
  const Slice part = slice(n / 8);
  copy_to_shared(kept, logits + part.first, part.count);
  const unsigned label = label_of(labels, blockIdx.y, part);
  __pipeline_wait_prior(0);

  // The exponentials of AT_ONCE vectors are relative to the largest logit of these vectors.
  Exponentials own = NO_NUMBERS;
  for (unsigned i = threadIdx.x; i < part.count; i += AT_ONCE * BLOCK) {
    uint4 some[AT_ONCE];
#pragma unroll
    for (unsigned k = 0; k < AT_ONCE; ++k) {
      some[k] = NO_LOGITS;
      if (i + k * BLOCK < part.count) some[k] = kept[i + k * BLOCK];
    }
    own = together(own, exponentials(some));
  }
  const Row row(over_cluster(cluster, over_block(own)), gridDim.y);
  grad += part.first;
#pragma unroll 4
  for (unsigned i = threadIdx.x; i < part.count; i += BLOCK) grad[i] = row.gradient(kept[i]);
  if (has(label, part, BLOCK)) {
    row.store_label(logit_at(kept, label), &losses[blockIdx.y], grad, label);
  }
  cluster.barrier_wait();
}

// The persistent clusters
// --------------------------------------------------------------------------

constexpr unsigned THREADS = 1024, PER = 4, STAGES = 2;

template <bool PUSHED>
__device__ void take_rows(const uint4* logits, const long long* labels, float* losses, uint4* grad,
                          unsigned n, unsigned rows) {
  using Rows = Ring<Exponentials, THREADS, PER, STAGES>;
  extern __shared__ uint4 stages[];
  __shared__ Rows::Shared shared;
  const Rows ring(shared, stages, logits, n / 8, rows);
  for (unsigned turn = 0, row = blockIdx.y; row < rows; ++turn, row += gridDim.y) {
    const unsigned label = label_of(labels, row, ring.part);
    uint4 v[PER];
    ring.take(v, turn, NO_LOGITS);
    const Exponentials own = exponentials(v);
    const bool mine = has(label, ring.part, THREADS);
    const float logit = mine ? logit_at(ring.stage(turn), label) : 0.0f;
    const Row all(ring.over_row<PUSHED>(own, turn), rows);
    uint4* to = grad + ring.begin(row);
#pragma unroll
    for (unsigned k = 0; k < PER; ++k) {
      if (ring.holds(k)) to[ring.index(k)] = all.gradient(v[k]);
    }
    if (mine) all.store_label(logit, &losses[row], to, label);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    ring(const uint4* __restrict__ logits, const long long* __restrict__ labels,
         float* __restrict__ losses, uint4* __restrict__ grad, unsigned n, unsigned rows) {
  take_rows<false>(logits, labels, losses, grad, n, rows);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    pushed(const uint4* __restrict__ logits, const long long* __restrict__ labels,
           float* __restrict__ losses, uint4* __restrict__ grad, unsigned n, unsigned rows) {
  take_rows<true>(logits, labels, losses, grad, n, rows);
}
