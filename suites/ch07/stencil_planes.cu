// planes: column of stencil.cu, but a thread's neighbors along x and y come from shared memory. The
// block fills shared memory plane by plane, with its own cells and their neighbors.

constexpr int X = 32, Y = 8, Z = 8, WIDE = X + 2;

extern "C" __global__ void __launch_bounds__(X* Y)
    planes(const float* __restrict__ u, float* __restrict__ out, int nx, int ny, int nz) {
  __shared__ float two[2][WIDE * (Y + 2)];  // while one plane is read, the other is filled
  const int tx = threadIdx.x, ty = threadIdx.y;
  const int x0 = blockIdx.x * X, y0 = blockIdx.y * Y, z0 = blockIdx.z * Z;
  const int x = x0 + tx, y = y0 + ty;
  const auto at = [=](int x, int y, int z) {
    const bool has = x >= 0 && x < nx && y >= 0 && y < ny && z >= 0 && z < nz;
    return has ? u[(z * ny + y) * nx + x] : 0.0f;
  };
  float column[Z + 2];
#pragma unroll
  for (int k = 0; k < Z + 2; ++k) column[k] = at(x, y, z0 + k - 1);
  const int row = tx / 2, side = tx % 2 * (X + 1);  // 16 lanes load both ends of a plane's 8 rows
#pragma unroll
  for (int k = 0; k < Z; ++k) {
    const int z = z0 + k;
    float* plane = two[k % 2];
    float* mine = plane + (ty + 1) * WIDE + tx + 1;
    const float here = column[k + 1];
    mine[0] = here;
    if (ty == 0) plane[tx + 1] = at(x, y0 - 1, z);
    if (ty == 1) plane[(Y + 1) * WIDE + tx + 1] = at(x, y0 + Y, z);
    if (ty == 2 && tx < 2 * Y) plane[(row + 1) * WIDE + side] = at(x0 + side - 1, y0 + row, z);
    __syncthreads();
    const float across = (mine[-1] + mine[1]) + (mine[-WIDE] + mine[WIDE]);
    const float made = 0.25f * here + 0.125f * (across + (column[k] + column[k + 2]));
    if (x < nx && y < ny && z < nz) out[(z * ny + y) * nx + x] = made;
  }
}
