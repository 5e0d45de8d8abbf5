// One step of a 7-point stencil on nz x ny x nx floats, fewer than 2^31. Cells outside are 0.
//
// in_cache: one thread per cell, seven loads from global memory. The L1 serves the cells that
//     threads share.
// column: a thread computes 8 cells along z, and keeps them and the cells at both ends in
//     registers.
// tiled: a block loads 32 x 8 x 8 cells and their faces into shared memory, then computes them.

constexpr int X = 32, Y = 8, Z = 8, WIDE = X + 2, PLANE = WIDE * (Y + 2);
static_assert(Y == Z, "a row of threads loads the faces of a plane");

__device__ float step(float here, float west, float east, float south, float north, float below,
                      float above) {
  return 0.25f * here + 0.125f * ((west + east) + (south + north) + (below + above));
}

struct Box {
  const float* u;
  int nx, ny, nz;

  __device__ int index(int x, int y, int z) const { return (z * ny + y) * nx + x; }
  __device__ float at(int x, int y, int z) const {
    const bool has = x >= 0 && x < nx && y >= 0 && y < ny && z >= 0 && z < nz;
    return has ? u[index(x, y, z)] : 0.0f;
  }
};

// A thread's Z cells, the cell below them, and the cell above them.
struct Column {
  float cell[Z + 2];

  __device__ Column(const Box& box, int x, int y, int z0) {
    const float* lowest = box.u + box.index(x, y, z0);
    const bool has = x < box.nx && y < box.ny;
#pragma unroll
    for (int k = 0; k < Z + 2; ++k) {
      const int z = z0 + k - 1;
      cell[k] = has && z >= 0 && z < box.nz ? lowest[(k - 1) * box.nx * box.ny] : 0.0f;
    }
  }
};

extern "C" __global__ void __launch_bounds__(X* Y)
    in_cache(const float* __restrict__ u, float* __restrict__ out, int nx, int ny, int nz) {
  const int x = blockIdx.x * X + threadIdx.x, y = blockIdx.y * Y + threadIdx.y, z = blockIdx.z;
  if (x >= nx || y >= ny) return;
  const int i = (z * ny + y) * nx + x;
  const float* here = u + i;
  out[i] = step(here[0], x > 0 ? here[-1] : 0.0f, x + 1 < nx ? here[1] : 0.0f,
                y > 0 ? here[-nx] : 0.0f, y + 1 < ny ? here[nx] : 0.0f,
                z > 0 ? here[-nx * ny] : 0.0f, z + 1 < nz ? here[nx * ny] : 0.0f);
}

extern "C" __global__ void __launch_bounds__(X* Y)
    tiled(const float* __restrict__ u, float* __restrict__ out, int nx, int ny, int nz) {
  __shared__ float tile[PLANE * (Z + 2)];
  const Box box{u, nx, ny, nz};
  const int tx = threadIdx.x, ty = threadIdx.y;
  const int x0 = blockIdx.x * X, y0 = blockIdx.y * Y, z0 = blockIdx.z * Z;
  // All loads come first, because each store into the tile waits for its load.
  const Column column(box, x0 + tx, y0 + ty, z0);
  const float south = box.at(x0 + tx, y0 - 1, z0 + ty), north = box.at(x0 + tx, y0 + Y, z0 + ty);
  const int row = tx / 2, side = tx % 2 * (X + 1);  // 16 lanes load both ends of a plane's 8 rows
  const float end = tx < 2 * Y ? box.at(x0 + side - 1, y0 + row, z0 + ty) : 0.0f;
  float* mine = tile + (ty + 1) * WIDE + tx + 1;
#pragma unroll
  for (int k = 0; k < Z + 2; ++k) mine[k * PLANE] = column.cell[k];
  tile[(ty + 1) * PLANE + tx + 1] = south;
  tile[(ty + 1) * PLANE + (Y + 1) * WIDE + tx + 1] = north;
  if (tx < 2 * Y) tile[(ty + 1) * PLANE + (row + 1) * WIDE + side] = end;
  __syncthreads();
  const int x = x0 + tx, y = y0 + ty;
  if (x >= nx || y >= ny) return;
  float* target = out + box.index(x, y, z0);
#pragma unroll
  for (int k = 0; k < Z; ++k) {
    const float* t = mine + (k + 1) * PLANE;
    const float made = step(t[0], t[-1], t[1], t[-WIDE], t[WIDE], t[-PLANE], t[PLANE]);
    if (z0 + k < nz) target[k * nx * ny] = made;
  }
}

extern "C" __global__ void __launch_bounds__(X* Y)
    column(const float* __restrict__ u, float* __restrict__ out, int nx, int ny, int nz) {
  const Box box{u, nx, ny, nz};
  const int x = blockIdx.x * X + threadIdx.x, y = blockIdx.y * Y + threadIdx.y;
  const int z0 = blockIdx.z * Z;
  if (x >= nx || y >= ny) return;
  const Column column(box, x, y, z0);
  const int first = box.index(x, y, z0);
#pragma unroll
  for (int k = 0; k < Z; ++k) {
    const bool has = z0 + k < nz;
    const int i = first + k * nx * ny;
    const float west = has && x > 0 ? u[i - 1] : 0.0f;
    const float east = has && x + 1 < nx ? u[i + 1] : 0.0f;
    const float south = has && y > 0 ? u[i - nx] : 0.0f;
    const float north = has && y + 1 < ny ? u[i + nx] : 0.0f;
    const float* c = column.cell + k;
    if (has) out[i] = step(c[1], west, east, south, north, c[0], c[2]);
  }
}
