// out = x transposed, rows x columns floats. A block handles a tile of 64 x 64, and a thread 16
// floats.
//
// naive: a warp reads along a row of x and writes down a column of out.
// tiled: the tile is transposed in shared memory, so a warp reads and writes along rows.
// padded: like tiled, with an unused float after each row of the tile.
// swizzled: like tiled, with the columns of each row of the tile in another order.

constexpr unsigned BLOCK = 256, TILE = 64, STEP = BLOCK / TILE, EACH = TILE / STEP, BANKS = 32;

// The place of an element of the tile in shared memory. A warp writes 32 neighbors of one row, and
// reads one column of 32 rows. With `plain`, the column is in one bank. The other two functions
// spread the column over 32 banks.
__device__ unsigned plain(unsigned row, unsigned column) { return row * TILE + column; }
__device__ unsigned pad(unsigned row, unsigned column) { return row * (TILE + 1) + column; }
__device__ unsigned swizzle(unsigned row, unsigned column) {
  return row * TILE + (column ^ row % BANKS);
}

struct Block {
  const float* __restrict__ x;
  float* __restrict__ out;
  unsigned rows, columns, top, left;
  // The thread's place in a row of the tile, and the first of its rows, which are STEP apart.
  unsigned along = threadIdx.x % TILE, down = threadIdx.x / TILE;

  __device__ Block(const float* x, float* out, unsigned rows, unsigned columns)
      : x(x), out(out), rows(rows), columns(columns) {
    const unsigned across = (columns + TILE - 1) / TILE;
    top = blockIdx.x / across * TILE;
    left = blockIdx.x % across * TILE;
  }
  __device__ bool whole() const { return top + TILE <= rows && left + TILE <= columns; }
  __device__ bool holds(unsigned row, unsigned column) const {
    return top + row < rows && left + column < columns;
  }
  __device__ float get(unsigned row, unsigned column) const {
    return x[static_cast<size_t>(top + row) * columns + left + column];
  }
  __device__ void put(unsigned row, unsigned column, float value) const {
    out[static_cast<size_t>(left + column) * rows + top + row] = value;
  }
};

// A whole tile needs no bounds checks, so a thread issues all its 16 loads before it waits for the
// first.
template <bool whole>
__device__ void read(const Block& block, float (&value)[EACH]) {
#pragma unroll
  for (unsigned k = 0; k < EACH; ++k) {
    const unsigned row = block.down + k * STEP;
    if (whole || block.holds(row, block.along)) value[k] = block.get(row, block.along);
  }
}

template <bool whole>
__device__ void turn_nothing(const Block& block) {
  float value[EACH];
  read<whole>(block, value);
#pragma unroll
  for (unsigned k = 0; k < EACH; ++k) {
    const unsigned row = block.down + k * STEP;
    if (whole || block.holds(row, block.along)) block.put(row, block.along, value[k]);
  }
}

template <bool whole, auto at>
__device__ void turn_tile(const Block& block, float* tile) {
  float value[EACH];
  read<whole>(block, value);
#pragma unroll
  for (unsigned k = 0; k < EACH; ++k) {
    const unsigned row = block.down + k * STEP;
    if (whole || block.holds(row, block.along)) tile[at(row, block.along)] = value[k];
  }
  __syncthreads();
#pragma unroll
  for (unsigned k = 0; k < EACH; ++k) {
    const unsigned column = block.down + k * STEP;
    if (whole || block.holds(block.along, column)) {
      block.put(block.along, column, tile[at(block.along, column)]);
    }
  }
}

template <auto at>
__device__ void through(float* tile, const float* x, float* out, unsigned rows, unsigned columns) {
  const Block block(x, out, rows, columns);
  if (block.whole()) {  // the same for every thread of the block
    turn_tile<true, at>(block, tile);
  } else {
    turn_tile<false, at>(block, tile);
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    naive(const float* x, float* out, unsigned rows, unsigned columns) {
  const Block block(x, out, rows, columns);
  if (block.whole()) {
    turn_nothing<true>(block);
  } else {
    turn_nothing<false>(block);
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    tiled(const float* x, float* out, unsigned rows, unsigned columns) {
  __shared__ float tile[TILE * TILE];
  through<plain>(tile, x, out, rows, columns);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    padded(const float* x, float* out, unsigned rows, unsigned columns) {
  __shared__ float tile[TILE * (TILE + 1)];
  through<pad>(tile, x, out, rows, columns);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    swizzled(const float* x, float* out, unsigned rows, unsigned columns) {
  __shared__ float tile[TILE * TILE];
  through<swizzle>(tile, x, out, rows, columns);
}
