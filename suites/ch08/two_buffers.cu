// A filter of 33 taps: out[i] = the sum over k of taps[k] * x[i + k]. Blocks loop over tiles of
// 1024 outputs, with a stride of the whole grid. A tile has 1024 + 32 inputs. A thread computes
// four neighboring outputs.
//
// one_buffer: load a tile into shared memory, wait, filter it, wait.
// loaded_ahead: like one_buffer, but the next tile is loaded into registers during the filter.
// two_buffers: like loaded_ahead, but the next tile goes to a second buffer. One barrier remains.
//
// The loads of the next tile come before the barrier. After the barrier, the compiler would move
// the loads and their branch to the end of the filter.

constexpr unsigned BLOCK = 256, TAPS = 33, TILE = 4 * BLOCK, VECTORS = (TILE + TAPS - 1) / 4;

struct Buffer {
  float4 at[VECTORS];
};

// A thread's part of a tile. The first threads also load the last 32 inputs of the tile.
struct Part {
  float4 first, last;

  __device__ void load(const float4* __restrict__ x, unsigned tile) {
    const float4* from = x + tile * (TILE / 4);
    first = from[threadIdx.x];
    if (threadIdx.x < VECTORS - BLOCK) last = from[BLOCK + threadIdx.x];
  }

  __device__ void store(Buffer& to) const {
    to.at[threadIdx.x] = first;
    if (threadIdx.x < VECTORS - BLOCK) to.at[BLOCK + threadIdx.x] = last;
  }
};

// Load each input and each group of four taps from shared memory once, for all four outputs.
__device__ float4 filter(const Buffer& from, const float4* taps) {
  float sum[4] = {};
  float4 now = from.at[threadIdx.x];
#pragma unroll
  for (unsigned group = 0; group < TAPS / 4; ++group) {
    const float4 next = from.at[threadIdx.x + group + 1], tap = taps[group];
    const float value[8] = {now.x, now.y, now.z, now.w, next.x, next.y, next.z, next.w};
    const float factor[4] = {tap.x, tap.y, tap.z, tap.w};
#pragma unroll
    for (unsigned k = 0; k < 4; ++k) {
#pragma unroll
      for (unsigned i = 0; i < 4; ++i) sum[i] = fmaf(factor[k], value[i + k], sum[i]);
    }
    now = next;
  }
  const float tap = taps[TAPS / 4].x;
  return {fmaf(tap, now.x, sum[0]), fmaf(tap, now.y, sum[1]), fmaf(tap, now.z, sum[2]),
          fmaf(tap, now.w, sum[3])};
}

// The taps are padded to whole groups of four.
struct Taps {
  float4 at[TAPS / 4 + 1];

  __device__ void load(const float* __restrict__ taps) {
    float* to = &at[0].x;
    if (threadIdx.x < 4 * (TAPS / 4 + 1)) {
      to[threadIdx.x] = threadIdx.x < TAPS ? taps[threadIdx.x] : 0.0f;
    }
  }
};

extern "C" __global__ void __launch_bounds__(BLOCK)
    one_buffer(const float* __restrict__ taps, const float4* __restrict__ x,
               float4* __restrict__ out, unsigned tiles) {
  __shared__ Taps shared;
  __shared__ Buffer buffer;
  shared.load(taps);
  for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    Part part;
    part.load(x, tile);
    part.store(buffer);
    __syncthreads();
    out[tile * BLOCK + threadIdx.x] = filter(buffer, shared.at);
    __syncthreads();  // so that the next tile does not overwrite this one too early
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    loaded_ahead(const float* __restrict__ taps, const float4* __restrict__ x,
                 float4* __restrict__ out, unsigned tiles) {
  __shared__ Taps shared;
  __shared__ Buffer buffer;
  shared.load(taps);
  Part part;
  part.load(x, blockIdx.x);
  for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    part.store(buffer);
    if (tile + gridDim.x < tiles) part.load(x, tile + gridDim.x);
    __syncthreads();
    out[tile * BLOCK + threadIdx.x] = filter(buffer, shared.at);
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    two_buffers(const float* __restrict__ taps, const float4* __restrict__ x,
                float4* __restrict__ out, unsigned tiles) {
  __shared__ Taps shared;
  __shared__ Buffer buffer[2];
  shared.load(taps);
  Part part;
  part.load(x, blockIdx.x);
  unsigned turn = 0;
  for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x, turn = 1 - turn) {
    // A thread gets here only after the barrier of the previous tile. So all threads have finished
    // the tile before the previous one, which was in this buffer.
    part.store(buffer[turn]);
    if (tile + gridDim.x < tiles) part.load(x, tile + gridDim.x);
    __syncthreads();
    out[tile * BLOCK + threadIdx.x] = filter(buffer[turn], shared.at);
  }
}
