// Inclusive prefix sums of n ints, in tiles of 8192. Every sum must fit an int.
//
// tile_sums: the sum of each tile.
// scan_sums: one block turns the sums of the tiles into their prefix sums, in place.
// scan_tiles: reads each tile again and writes its prefix sums, which begin with the sum of all
//     tiles before it.
// look_back: one pass. A tile computes the sum of all earlier tiles from the sums that these tiles
// publish while they run (Merrill and Garland, Single-pass Parallel Prefix Scan with Decoupled
// Look-back, 2016).

constexpr unsigned BLOCK = 256, ROUNDS = 8, WARPS = BLOCK / 32;
constexpr unsigned VECTORS = ROUNDS * BLOCK, SEGMENTS = ROUNDS * WARPS;
static_assert(SEGMENTS == 64, "a warp scans them two a lane");

// A thread has vector k * BLOCK + threadIdx.x of the tile in round k. The 32 vectors of a warp are
// neighbors in memory and are called a segment. Elements past the end are 0.
struct Tile {
  int4 part[ROUNDS];
};

__device__ unsigned vector_of(unsigned tile, unsigned k) {
  return tile * VECTORS + k * BLOCK + threadIdx.x;
}

__device__ bool is_whole(unsigned tile, unsigned n) { return (tile + 1) * VECTORS <= n / 4; }

__device__ Tile load(const int4* x, unsigned tile, unsigned n) {
  Tile items;
#pragma unroll
  for (unsigned k = 0; k < ROUNDS; ++k) {
    const unsigned v = vector_of(tile, k), i = 4 * v;
    if (is_whole(tile, n)) {
      items.part[k] = x[v];
    } else {
      const int* at = reinterpret_cast<const int*>(x) + i;
      items.part[k].x = i < n ? at[0] : 0;
      items.part[k].y = i + 1 < n ? at[1] : 0;
      items.part[k].z = i + 2 < n ? at[2] : 0;
      items.part[k].w = i + 3 < n ? at[3] : 0;
    }
  }
  return items;
}

__device__ void add(int4& p, int more) { p.x += more, p.y += more, p.z += more, p.w += more; }

__device__ void store(Tile items, int before, int4* out, unsigned tile, unsigned n) {
#pragma unroll
  for (unsigned k = 0; k < ROUNDS; ++k) {
    const unsigned v = vector_of(tile, k), i = 4 * v;
    add(items.part[k], before);
    if (is_whole(tile, n)) {
      out[v] = items.part[k];
    } else {
      int* at = reinterpret_cast<int*>(out) + i;
      if (i < n) at[0] = items.part[k].x;
      if (i + 1 < n) at[1] = items.part[k].y;
      if (i + 2 < n) at[2] = items.part[k].z;
      if (i + 3 < n) at[3] = items.part[k].w;
    }
  }
}

__device__ int warp_scan(int value) {
#pragma unroll
  for (unsigned apart = 1; apart < 32; apart *= 2) {
    const int other = __shfl_up_sync(~0u, value, apart);
    if (threadIdx.x % 32 >= apart) value += other;
  }
  return value;
}

__device__ int warp_sum(int value) {
#pragma unroll
  for (unsigned half = 16; half > 0; half /= 2) value += __shfl_xor_sync(~0u, value, half);
  return value;
}

// Turns a tile into its prefix sums, and returns the tile's sum to every thread. Each warp scans
// its segments. Then warp 0 scans the sums of the segments, in memory order.
__device__ int scan(Tile& items) {
  __shared__ int upto[SEGMENTS];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (unsigned k = 0; k < ROUNDS; ++k) {
    int4& p = items.part[k];
    p.y += p.x, p.z += p.y, p.w += p.z;
    const int sum = warp_scan(p.w);
    add(p, sum - p.w);
    if (lane == 31) upto[k * WARPS + warp] = sum;
  }
  __syncthreads();
  if (warp == 0) {
    const int even = upto[2 * lane], odd = upto[2 * lane + 1], sum = warp_scan(even + odd);
    upto[2 * lane] = sum - odd;
    upto[2 * lane + 1] = sum;
  }
  __syncthreads();
#pragma unroll
  for (unsigned k = 0; k < ROUNDS; ++k) {
    const unsigned segment = k * WARPS + warp;
    add(items.part[k], segment > 0 ? upto[segment - 1] : 0);
  }
  return upto[SEGMENTS - 1];
}

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
    tile_sums(const int4* x, int* sums, unsigned n) {
  __shared__ int part[WARPS];
  const Tile items = load(x, blockIdx.x, n);
  int sum = 0;
#pragma unroll
  for (unsigned k = 0; k < ROUNDS; ++k) {
    sum += items.part[k].x + items.part[k].y + items.part[k].z + items.part[k].w;
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 32) sum = warp_sum(threadIdx.x < WARPS ? part[threadIdx.x] : 0);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(BLOCK) scan_sums(int4* sums, unsigned tiles) {
  int before = 0;
  for (unsigned tile = 0; tile * VECTORS * 4 < tiles; ++tile) {
    Tile items = load(sums, tile, tiles);
    const int sum = scan(items);
    store(items, before, sums, tile, tiles);
    before += sum;
    __syncthreads();  // other threads may still read the sums that the next scan overwrites
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
    scan_tiles(const int4* x, const int* sums, int4* out, unsigned n) {
  Tile items = load(x, blockIdx.x, n);
  const int before = blockIdx.x > 0 ? sums[blockIdx.x - 1] : 0;
  scan(items);
  store(items, before, out, blockIdx.x, n);
}

// The word that a tile publishes holds both kind and sum, so a reader always gets a matching pair
// without a fence. Zero means that the tile has published nothing yet.
typedef unsigned long long Word;
enum Kind : unsigned { NOTHING, TILE, PREFIX };  // its own sum, or the sum up to its end

__device__ Word word(Kind kind, int sum) {
  return static_cast<Word>(kind) << 32 | static_cast<unsigned>(sum);
}

__device__ Kind kind_of(Word word) { return static_cast<Kind>(word >> 32); }
__device__ int sum_of(Word word) { return static_cast<int>(static_cast<unsigned>(word)); }

// Volatile, so each access is a single 8-byte access to the L2, which all SMs share.
__device__ void tell(Word* known, unsigned tile, Word word) {
  *static_cast<volatile Word*>(known + tile) = word;
}

__device__ Word ask(Word* known, int tile) {
  return tile < 0 ? word(PREFIX, 0) : *static_cast<volatile Word*>(known + tile);
}

// Returns the sum of all elements before `tile`. Only warp 0 calls this function. The warp looks at
// 32 tiles at a time, and lane 0 looks at the nearest tile. All earlier tiles have started, so each
// of them will publish.
__device__ int sum_before(Word* known, unsigned tile) {
  int before = 0;
  for (int nearest = static_cast<int>(tile) - 1;; nearest -= 32) {
    const int mine = nearest - static_cast<int>(threadIdx.x);
    Word told = ask(known, mine);
    while (__any_sync(~0u, kind_of(told) == NOTHING)) told = ask(known, mine);
    const unsigned prefixes = __ballot_sync(~0u, kind_of(told) == PREFIX);
    const unsigned last = prefixes ? __ffs(prefixes) - 1 : 31;
    before += warp_sum(threadIdx.x <= last ? sum_of(told) : 0);
    if (prefixes) return before;
  }
}

// `known` has a word for each tile, and then the number of tiles that have started. All words are 0
// at first.
extern "C" __global__ void __launch_bounds__(BLOCK, 4)
    look_back(const int4* x, int4* out, unsigned long long* known, unsigned n, unsigned tiles) {
  __shared__ unsigned ticket;
  __shared__ int prefix;
  // The tile is not blockIdx.x, because blocks may start in any order, and a tile may only wait for
  // tiles that have already started.
  if (threadIdx.x == 0) ticket = static_cast<unsigned>(atomicAdd(&known[tiles], 1ull));
  __syncthreads();
  const unsigned tile = ticket;
  Tile items = load(x, tile, n);
  const int sum = scan(items);
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0 && tile > 0) tell(known, tile, word(TILE, sum));
    const int before = sum_before(known, tile);
    if (threadIdx.x == 0) {
      tell(known, tile, word(PREFIX, before + sum));
      prefix = before;
    }
  }
  __syncthreads();
  store(items, prefix, out, tile, n);
}
