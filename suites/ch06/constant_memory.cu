// Tables that never change, in global memory, in constant memory, and in the code.
//
// series_in_global: out[i] = c[0] + c[1] * x[i] + ... + c[63] * x[i]^63, with c in global memory.
// series_in_constant: the same, with c in constant memory.
// series_in_code: the same, with c as numbers in the instructions.
// decode_in_constant: out[i] = table[codes[i]], with the table of 256 entries in constant memory.
// decode_in_global: the same, with the table in global memory, which the L1 caches.
// decode_in_shared: the same, but each block copies the table into shared memory.
// decode_computed: the same, without a table.

constexpr unsigned BLOCK = 256, TERMS = 64, ENTRIES = 256, EACH = 16;
static_assert(ENTRIES == BLOCK, "each thread copies one entry of the table");

// (-1)^k / (k + 1): the series of log(1 + x) / x.
__host__ __device__ constexpr float coefficient(unsigned k) {
  return (k % 2 ? -1.0f : 1.0f) / static_cast<float>(k + 1);
}

// The value of a code of G.711 mu-law: a sign, 3 bits of exponent and 4 of mantissa, all inverted.
__host__ __device__ constexpr short linear(unsigned code) {
  const unsigned bits = ~code & 0xff;
  const int size = static_cast<int>(((bits & 15) << 3) + 132) << (bits >> 4 & 7);
  return static_cast<short>(bits & 128 ? 132 - size : size - 132);
}

struct Series {
  float c[TERMS];
  __host__ __device__ constexpr Series() : c() {
    for (unsigned k = 0; k < TERMS; ++k) c[k] = coefficient(k);
  }
};

struct Table {
  short value[ENTRIES];
  __host__ __device__ constexpr Table() : value() {
    for (unsigned code = 0; code < ENTRIES; ++code) value[code] = linear(code);
  }
};

// The arrays are not `const`, because the compiler would then put the numbers into the code.
__device__ Series series_global;
__constant__ Series series_constant;
__device__ Table table_global;
__constant__ Table table_constant;

// All lanes of a warp need the same coefficient at the same time.
template <typename Coefficient>
__device__ void evaluate(const float* __restrict__ x, float* __restrict__ out, unsigned n,
                         Coefficient c) {
  const unsigned i = blockIdx.x * BLOCK + threadIdx.x;
  if (i >= n) return;
  const float at = x[i];
  float sum = c(TERMS - 1);
#pragma unroll
  for (int k = TERMS - 2; k >= 0; --k) sum = sum * at + c(k);
  out[i] = sum;
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    series_in_global(const float* __restrict__ x, float* __restrict__ out, unsigned n) {
  evaluate(x, out, n, [](unsigned k) { return series_global.c[k]; });
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    series_in_constant(const float* __restrict__ x, float* __restrict__ out, unsigned n) {
  evaluate(x, out, n, [](unsigned k) { return series_constant.c[k]; });
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    series_in_code(const float* __restrict__ x, float* __restrict__ out, unsigned n) {
  evaluate(x, out, n, [](unsigned k) { return coefficient(k); });
}

// The lanes of a warp need different entries. A thread decodes EACH codes in groups of four, so it
// loads 4 bytes and stores 8. All its loads come before the first look-up.
template <typename Entry>
__device__ void decode(const uchar4* __restrict__ codes, short4* __restrict__ out, unsigned n,
                       Entry entry) {
  const unsigned first = blockIdx.x * (BLOCK * EACH);
  if (n - first >= BLOCK * EACH) {
    constexpr unsigned groups = EACH / 4;
    const unsigned mine = first / 4 + threadIdx.x;
    uchar4 four[groups];
#pragma unroll
    for (unsigned k = 0; k < groups; ++k) four[k] = codes[mine + k * BLOCK];
#pragma unroll
    for (unsigned k = 0; k < groups; ++k) {
      const uchar4 c = four[k];
      out[mine + k * BLOCK] = make_short4(entry(c.x), entry(c.y), entry(c.z), entry(c.w));
    }
  } else {  // the last block, one code after another
    const unsigned char* single = reinterpret_cast<const unsigned char*>(codes);
#pragma unroll 1
    for (unsigned i = first + threadIdx.x; i < n; i += BLOCK) {
      reinterpret_cast<short*>(out)[i] = entry(single[i]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    decode_in_constant(const uchar4* __restrict__ codes, short4* __restrict__ out,
                       unsigned n) {
  decode(codes, out, n, [](unsigned code) { return table_constant.value[code]; });
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    decode_in_global(const uchar4* __restrict__ codes, short4* __restrict__ out,
                     unsigned n) {
  decode(codes, out, n, [](unsigned code) { return table_global.value[code]; });
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    decode_in_shared(const uchar4* __restrict__ codes, short4* __restrict__ out,
                     unsigned n) {
  __shared__ short copy[ENTRIES];
  copy[threadIdx.x] = table_global.value[threadIdx.x];
  __syncthreads();
  decode(codes, out, n, [&](unsigned code) { return copy[code]; });
}

extern "C" __global__ void __launch_bounds__(BLOCK, 8)
    decode_computed(const uchar4* __restrict__ codes, short4* __restrict__ out,
                    unsigned n) {
  decode(codes, out, n, [](unsigned code) { return linear(code); });
}
