// scores: out[i] = the dot product of row i of x with row index[i] of a table. A row has 128
//     floats. One warp handles one row, 16 bytes per lane.

constexpr unsigned LANES = 32;

extern "C" __global__ void scores(const float4* __restrict__ x, const float4* __restrict__ table,
                                  const int* __restrict__ index, float* __restrict__ out,
                                  unsigned rows) {
  const unsigned row = (blockIdx.x * blockDim.x + threadIdx.x) / LANES;
  const unsigned lane = threadIdx.x % LANES;
  if (row >= rows) return;
  const float4 a = x[size_t(row) * LANES + lane];
  const float4 b = table[size_t(index[row]) * LANES + lane];
  float sum = (a.x * b.x + a.y * b.y) + (a.z * b.z + a.w * b.w);
  for (unsigned half = LANES / 2; half > 0; half /= 2) sum += __shfl_down_sync(~0u, sum, half);
  if (lane == 0) out[row] = sum;
}
