// Lamport's all-reduce: it needs no handshake, because the data itself shows that it has arrived.
//
// A rank has three generations of slots, each with a slot for every rank. Every float of a free
// slot is -0.0.
// A call replaces -0.0 in x by 0.0 and pushes x into its slot on every other rank. The call waits
// until every float that it needs differs from -0.0, and sums the floats in the order of the ranks.
// Each call uses the next generation. A call also sets the slots of the previous call's generation
// to -0.0 again. The call after the next reuses these slots. By then, each rank has received data
// that every other rank sent after freeing its slots.
// Each block has its own part of x and of all slots, and counts its own calls (turns). So no block
// waits for another block of the same GPU.

constexpr unsigned BLOCK = 256, GENERATIONS = 3, FREE = 0x80000000;  // the bits of -0.0f

// Strong loads and stores at system scope, four floats at once. Each float is read or written
// whole.
__device__ void push(float4* at, float4 value) {
  asm volatile("st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

__device__ float4 look(const float4* at) {
  float4 value;
  asm volatile("ld.relaxed.sys.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(at)
               : "memory");
  return value;
}

__device__ bool arrived(float x) { return __float_as_uint(x) != FREE; }

__device__ float4 taken(const float4* at) {
  float4 value;
  do {
    value = look(at);
  } while (!(arrived(value.x) && arrived(value.y) && arrived(value.z) && arrived(value.w)));
  return value;
}

// Return four floats of x, with zeros beyond the end of x. Adding 0.0 turns -0.0 into 0.0, and does
// not change any other float.
__device__ float4 sendable(const float4* x, unsigned i, unsigned n) {
  if (4 * i + 4 <= n) {
    const float4 value = x[i];
    return {value.x + 0.0f, value.y + 0.0f, value.z + 0.0f, value.w + 0.0f};
  }
  const float* rest = reinterpret_cast<const float*>(x) + 4 * i;
  const unsigned left = n - 4 * i;
  return {rest[0] + 0.0f, left > 1 ? rest[1] + 0.0f : 0.0f, left > 2 ? rest[2] + 0.0f : 0.0f, 0.0f};
}

__device__ void store(float4* out, float4 value, unsigned i, unsigned n) {
  if (4 * i + 4 <= n) {
    out[i] = value;
    return;
  }
  const float each[3] = {value.x, value.y, value.z};
  for (unsigned k = 0; 4 * i + k < n; ++k) reinterpret_cast<float*>(out)[4 * i + k] = each[k];
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    pushed(const float4* x, float4* out, float4* const* buffers, int* turns, unsigned rank,
           unsigned world, unsigned n) {
  const unsigned i = blockIdx.x * BLOCK + threadIdx.x, count = (n + 3) / 4;
  const unsigned turn = turns[blockIdx.x], before = (turn + GENERATIONS - 1) % GENERATIONS;
  if (i < count) {
    const float4 mine = sendable(x, i, n);
    for (unsigned step = 1; step < world; ++step) {
      push(buffers[(rank + step) % world] + (turn * world + rank) * count + i, mine);
    }
    float4* here = buffers[rank];
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    for (unsigned from = 0; from < world; ++from) {
      float4 part = mine;
      if (from != rank) {
        push(here + (before * world + from) * count + i, {-0.0f, -0.0f, -0.0f, -0.0f});
        part = taken(here + (turn * world + from) * count + i);
      }
      sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
    }
    store(out, sum, i, n);
  }
  __syncthreads();  // now all threads have read the turn
  if (threadIdx.x == 0) turns[blockIdx.x] = (turn + 1) % GENERATIONS;
}
