// Cross entropy of bf16 logits: the loss of each row, and the gradient of the mean of all losses.
//
// clustered: the blocks of a cluster share a row and keep it in their shared memory. So it is read
//   once. They read each other's maxima and sums from shared memory too.
//
// Rows begin at multiples of 16 bytes, which are 8 logits.

#include <cuda_bf16.h>

#include "cluster_rows.cuh"

constexpr float LOWEST = -3.4028234e38f;

// 8 logits. A pair has 4 bytes.
union Vector {
  uint4 bytes;
  __nv_bfloat162 pair[4];
};

__device__ float most_of(uint4 bytes) {
  const Vector x{bytes};
  const __nv_bfloat162 two = __hmax2(__hmax2(x.pair[0], x.pair[1]), __hmax2(x.pair[2], x.pair[3]));
  const float2 most = __bfloat1622float2(two);
  return fmaxf(most.x, most.y);
}

// Returns the sum of exp(x - most).
__device__ float sum_of(uint4 bytes, float most) {
  const Vector x{bytes};
  float sum = 0.0f;
#pragma unroll
  for (const __nv_bfloat162 pair : x.pair) {
    const float2 value = __bfloat1622float2(pair);
    sum += __expf(value.x - most) + __expf(value.y - most);
  }
  return sum;
}

// Returns (exp(x - log_sum) - own) * share. `own` is 1 for logit `label` of these 8, otherwise 0.
// A label of 8 or more is not among them.
__device__ uint4 gradient(uint4 bytes, float log_sum, unsigned label, float share) {
  Vector x{bytes};
  float2 value[4];
#pragma unroll
  for (unsigned i = 0; i < 4; ++i) {
    const float2 logit = __bfloat1622float2(x.pair[i]);
    value[i] = {__expf(logit.x - log_sum), __expf(logit.y - log_sum)};
  }
  if (label < 8) {
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      value[i].x -= label == 2 * i ? 1.0f : 0.0f;
      value[i].y -= label == 2 * i + 1 ? 1.0f : 0.0f;
    }
  }
#pragma unroll
  for (unsigned i = 0; i < 4; ++i) {
    x.pair[i] = __floats2bfloat162_rn(value[i].x * share, value[i].y * share);
  }
  return x.bytes;
}

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
    clustered(const uint4* __restrict__ logits, const long long* __restrict__ labels,
              float* __restrict__ losses, uint4* __restrict__ grad, unsigned n) {
  extern __shared__ uint4 kept[];
  const auto cluster = cooperative_groups::this_cluster();
  const Slice part = slice(n / 8);
  copy_to_shared(kept, logits + part.first, part.count);
  // Counted from the first logit of the slice. It is larger than all of them if it is before them.
  const unsigned label = static_cast<unsigned>(labels[blockIdx.y]) - 8 * part.begin;
  __pipeline_wait_prior(0);

  // A thread's exponentials are relative to its own largest logit. The lowest number instead of
  // -inf: a thread without logits would compute -inf - -inf.
  Exponentials own{LOWEST, 0.0f};
  for (unsigned i = threadIdx.x; i < part.count; i += BLOCK) {
    own.most = fmaxf(own.most, most_of(kept[i]));
  }
  for (unsigned i = threadIdx.x; i < part.count; i += BLOCK) own.total += sum_of(kept[i], own.most);
  const Exponentials row = over_cluster(cluster, over_block(own));

  const float log_sum = row.most + __logf(row.total), share = 1.0f / static_cast<float>(gridDim.y);
  grad += part.first;
  for (unsigned i = threadIdx.x; i < part.count; i += BLOCK) {
    grad[i] = gradient(kept[i], log_sum, label - 8 * i, share);
  }
  // The thread that has copied the label's logit still has it.
  if (label / 8 < part.count && label / 8 % BLOCK == threadIdx.x) {
    const __nv_bfloat16* logit = reinterpret_cast<const __nv_bfloat16*>(kept) + label;
    losses[blockIdx.y] = log_sum - __bfloat162float(*logit);
  }
  cluster.barrier_wait();
}
