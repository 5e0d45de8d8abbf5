// C = A @ B in fp32 on CUDA cores. All matrices are row-major: (m, n) = (m, k) @ (k, n).
//
// naive: one element of C per thread. Neighboring threads have neighboring columns.
// tiled: like naive, but with operands from 32 x 32 tiles of A and B in shared memory.
// register_tiled: like tiled, but 8 x 16 elements per thread and 128 x 128 per block. A tile has 8
//     elements along k.
// vectorized: like register_tiled, but with 16 bytes per access. A is transposed in shared memory.
// prefetched: like vectorized, but loads the next tile and operands during the products.
//
// vectorized and prefetched need n and k to be multiples of 4, so that rows begin at multiples of
// 16 bytes.

constexpr int SIDE = 32;
constexpr int M = 128, N = 128, K = 8, THREADS = 128;
constexpr int ROWS = 8, COLUMNS = 16;

extern "C" __global__ __launch_bounds__(SIDE * SIDE) void naive(const float* __restrict__ a,
                                                                const float* __restrict__ b,
                                                                float* __restrict__ c, int m,
                                                                int n, int k) {
  const int row = blockIdx.y * SIDE + threadIdx.y, column = blockIdx.x * SIDE + threadIdx.x;
  if (row >= m || column >= n) return;
  float total = 0.0f;
  for (int i = 0; i < k; ++i) total += a[size_t(row) * k + i] * b[size_t(i) * n + column];
  c[size_t(row) * n + column] = total;
}

extern "C" __global__ __launch_bounds__(SIDE * SIDE) void tiled(const float* __restrict__ a,
                                                                const float* __restrict__ b,
                                                                float* __restrict__ c, int m,
                                                                int n, int k) {
  __shared__ float left[SIDE][SIDE], right[SIDE][SIDE];
  const int x = threadIdx.x, y = threadIdx.y;
  const int row = blockIdx.y * SIDE + y, column = blockIdx.x * SIDE + x;
  float total = 0.0f;
  for (int start = 0; start < k; start += SIDE) {
    left[y][x] = row < m && start + x < k ? a[size_t(row) * k + start + x] : 0.0f;
    right[y][x] = start + y < k && column < n ? b[size_t(start + y) * n + column] : 0.0f;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SIDE; ++i) total += left[y][i] * right[i][x];
    __syncthreads();  // so that all threads have read the tile before it is overwritten
  }
  if (row < m && column < n) c[size_t(row) * n + column] = total;
}

__device__ void multiply(const float (&a)[ROWS], const float (&b)[COLUMNS],
                         float (&total)[ROWS][COLUMNS]) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) total[i][j] += a[i] * b[j];
  }
}

// The elements of a thread are 16 rows and 8 columns apart. So a warp reads 8 neighboring values of
// B, and values from 4 rows of A. These rows start 8 banks apart.
extern "C" __global__ __launch_bounds__(THREADS, 2) void register_tiled(
    const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c, int m, int n,
    int k) {
  __shared__ float left[M][K], right[K][N];
  const int t = threadIdx.x, x = t % 8, y = t / 8;
  const int top = blockIdx.y * M, edge = blockIdx.x * N;
  float total[ROWS][COLUMNS] = {};
  for (int start = 0; start < k; start += K) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int row = top + y + 16 * i;
      left[y + 16 * i][x] = row < m && start + x < k ? a[size_t(row) * k + start + x] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const bool inside = start + i < k && edge + t < n;
      right[i][t] = inside ? b[size_t(start + i) * n + edge + t] : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < K; ++step) {
      float u[ROWS], v[COLUMNS];
#pragma unroll
      for (int i = 0; i < ROWS; ++i) u[i] = left[y + 16 * i][step];
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) v[j] = right[step][x + 8 * j];
      multiply(u, v, total);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      const int row = top + y + 16 * i, column = edge + x + 8 * j;
      if (row < m && column < n) c[size_t(row) * n + column] = total[i][j];
    }
  }
}

__device__ float4 load(const float* from) { return *reinterpret_cast<const float4*>(from); }
__device__ void store(float* to, float4 value) { *reinterpret_cast<float4*>(to) = value; }

// A tile in shared memory. A warp writes to two rows of A at once, which are four rows apart. Four
// unused floats per row put the two rows into different banks.
struct __align__(16) Tile {
  float a[K][M + 4], b[K][N];
};

// This thread's part of a tile, in registers on its way from global to shared memory.
struct Carried {
  float4 a[2], b[2];
};

struct Source {
  const float *a[2], *b;
  int n, left_a, left_b;

  // Threads beyond the edges of C read the last row or column again, and do not store the products.
  __device__ Source(const float* from_a, const float* from_b, int m, int n, int k) : n(n) {
    const int t = threadIdx.x, row = blockIdx.y * M + t / 2, column = blockIdx.x * N + t % 32 * 4;
    a[0] = from_a + size_t(min(row, m - 1)) * k + t % 2 * 4;
    a[1] = from_a + size_t(min(row + 64, m - 1)) * k + t % 2 * 4;
    b = from_b + size_t(t / 32) * n + min(column, n - 4);
    left_a = k - t % 2 * 4;
    left_b = k - t / 32;
  }

  __device__ void next(Carried& tile) {
    const float4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      tile.a[i] = left_a > 0 ? load(a[i]) : zero;
      tile.b[i] = left_b > 4 * i ? load(b + size_t(4 * i) * n) : zero;
      a[i] += K;
    }
    b += size_t(K) * n;
    left_a -= K;
    left_b -= K;
  }
};

__device__ void place(Tile& tile, const Carried& carried) {
  const int t = threadIdx.x;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 a = carried.a[i];
    const float column[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) tile.a[t % 2 * 4 + j][t / 2 + 64 * i] = column[j];
    store(&tile.b[t / 32 + 4 * i][t % 32 * 4], carried.b[i]);
  }
}

// A warp computes 64 x 64 elements of C, and each of its threads 2 x 4 blocks of 4 x 4 elements.
// The blocks start 32 rows and 16 columns apart. A warp reads 128 bytes of A or 64 of B at once, so
// there are no bank conflicts. Lanes i and i ^ 2 read the same rows, and lanes i and i ^ 1 read the
// same columns. The hardware merges such reads of 16 bytes.
struct Place {
  int row, column;

  __device__ Place() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    row = warp / 2 * 64 + (lane / 8 * 2 + lane % 2) * 4;
    column = warp % 2 * 64 + lane / 2 % 4 * 4;
  }
};

struct Operands {
  float a[ROWS], b[COLUMNS];

  __device__ void read(const Tile& tile, int step, Place place) {
#pragma unroll
    for (int i = 0; i < ROWS; i += 4) store(a + i, load(&tile.a[step][place.row + 8 * i]));
#pragma unroll
    for (int j = 0; j < COLUMNS; j += 4) store(b + j, load(&tile.b[step][place.column + 4 * j]));
  }
};

__device__ void write(const float (&total)[ROWS][COLUMNS], float* c, int m, int n, Place place) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int row = blockIdx.y * M + place.row + i / 4 * 32 + i % 4;
#pragma unroll
    for (int j = 0; j < COLUMNS; j += 4) {
      const int column = blockIdx.x * N + place.column + 4 * j;
      const float4 four = {total[i][j], total[i][j + 1], total[i][j + 2], total[i][j + 3]};
      if (row < m && column < n) store(c + size_t(row) * n + column, four);
    }
  }
}

extern "C" __global__ __launch_bounds__(THREADS, 2) void vectorized(const float* __restrict__ a,
                                                                    const float* __restrict__ b,
                                                                    float* __restrict__ c, int m,
                                                                    int n, int k) {
  __shared__ Tile tile;
  const Place place_of;
  Source source(a, b, m, n, k);
  float total[ROWS][COLUMNS] = {};
  for (int start = 0; start < k; start += K) {
    Carried carried;
    source.next(carried);
    place(tile, carried);
    __syncthreads();
#pragma unroll
    for (int step = 0; step < K; ++step) {
      Operands operands;
      operands.read(tile, step, place_of);
      multiply(operands.a, operands.b, total);
    }
    __syncthreads();
  }
  write(total, c, m, n, place_of);
}

extern "C" __global__ __launch_bounds__(THREADS, 2) void prefetched(const float* __restrict__ a,
                                                                    const float* __restrict__ b,
                                                                    float* __restrict__ c, int m,
                                                                    int n, int k) {
  __shared__ Tile tiles[2];
  const Place place_of;
  Source source(a, b, m, n, k);
  Carried carried;
  Operands operands[2];
  float total[ROWS][COLUMNS] = {};
  source.next(carried);
  place(tiles[0], carried);
  source.next(carried);
  __syncthreads();
  operands[0].read(tiles[0], 0, place_of);
  int now = 0;
  for (int start = 0; start < k; start += K) {
#pragma unroll
    for (int step = 0; step < K; ++step) {
      if (step == K - 1) {  // all operands of this tile are in registers: switch to the other tile
        now ^= 1;
        place(tiles[now], carried);
        source.next(carried);  // placed one tile later; zeros beyond the last tile
        __syncthreads();
      }
      operands[(step + 1) % 2].read(tiles[now], (step + 1) % K, place_of);
      multiply(operands[step % 2].a, operands[step % 2].b, total);
    }
  }
  write(total, c, m, n, place_of);
}
