// out[i] = the sum over m bodies j of weight[j] / sqrt(distance(i, j)^2 + SOFT), for n points. This
// sum is the softened potential of the bodies. Bodies and points have x, y, z and a weight. The
// weight of a point is not used.
//
// accurate: sqrtf and a division, both rounded as IEEE 754 requires.
// reciprocal_root: rsqrtf and a multiplication.

constexpr unsigned BLOCK = 256;
constexpr float SOFT = 0.01f;

struct Accurate {
  __device__ float operator()(float weight, float square) const { return weight / sqrtf(square); }
};

struct ReciprocalRoot {
  __device__ float operator()(float weight, float square) const { return weight * rsqrtf(square); }
};

template <typename Term>
__device__ void potential(Term term, const float4* __restrict__ bodies, unsigned m,
                          const float4* __restrict__ points, float* __restrict__ out, unsigned n) {
  __shared__ float4 tile[BLOCK];
  const unsigned i = blockIdx.x * BLOCK + threadIdx.x;
  const float4 mine = points[min(i, n - 1)];
  float sum = 0.0f;
  for (unsigned begin = 0; begin < m; begin += BLOCK) {
    const unsigned count = min(BLOCK, m - begin);
    if (threadIdx.x < count) tile[threadIdx.x] = bodies[begin + threadIdx.x];
    __syncthreads();
#pragma unroll 4
    for (unsigned j = 0; j < count; ++j) {
      const float4 other = tile[j];
      const float x = other.x - mine.x, y = other.y - mine.y, z = other.z - mine.z;
      sum += term(other.w, fmaf(x, x, fmaf(y, y, fmaf(z, z, SOFT))));
    }
    __syncthreads();
  }
  if (i < n) out[i] = sum;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    accurate(const float4* bodies, unsigned m, const float4* points, float* out, unsigned n) {
  potential(Accurate{}, bodies, m, points, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    reciprocal_root(const float4* bodies, unsigned m, const float4* points, float* out,
                    unsigned n) {
  potential(ReciprocalRoot{}, bodies, m, points, out, n);
}
