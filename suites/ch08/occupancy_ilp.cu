// A grid of any size loops over n floats. A thread handles one, two, four or eight floats at a
// time.
//
// scale_1, scale_2, scale_4, scale_8: out[i] = a * x[i]. All loads of a thread come before its
//     first store.
// iterate_1, iterate_2, iterate_4: out[i] = z after 2048 steps of z -> a * z + x[i], beginning at z
// = x[i]. The steps of a thread's chains alternate.

constexpr unsigned BLOCK = 128, STEPS = 2048;

struct Scale {
  float a;
  template <unsigned each>
  __device__ void operator()(float (&value)[each]) const {
#pragma unroll
    for (unsigned k = 0; k < each; ++k) value[k] *= a;
  }
};

// Each step depends on the previous step, so a single chain waits for every multiply-add.
struct Iterate {
  float a;
  template <unsigned each>
  __device__ void operator()(float (&value)[each]) const {
    float c[each];
#pragma unroll
    for (unsigned k = 0; k < each; ++k) c[k] = value[k];
#pragma unroll (64 / each) // the same number of instructions per iteration for every `each`
    for (unsigned step = 0; step < STEPS; ++step) {
#pragma unroll
      for (unsigned k = 0; k < each; ++k) value[k] = fmaf(a, value[k], c[k]);
    }
  }
};

// A block handles tiles of BLOCK * each elements, with a stride of the whole grid. The loop over
// tiles is not unrolled, so that only `each` sets how many elements a thread handles at a time. One
// bounds check covers a whole tile, so no load waits for a check.
template <unsigned each, typename Function>
__device__ void walk(Function function, const float* __restrict__ x, float* __restrict__ out,
                     unsigned n) {
  constexpr unsigned TILE = BLOCK * each;
#pragma unroll 1
  for (unsigned begin = blockIdx.x * TILE; begin < n; begin += gridDim.x * TILE) {
    const unsigned first = begin + threadIdx.x;
    const bool whole = begin + TILE <= n;
    float value[each] = {};
    if (whole) {
#pragma unroll
      for (unsigned k = 0; k < each; ++k) value[k] = x[first + k * BLOCK];
    } else {
      for (unsigned k = 0; k < each; ++k) {
        if (first + k * BLOCK < n) value[k] = x[first + k * BLOCK];
      }
    }
    function(value);
    if (whole) {
#pragma unroll
      for (unsigned k = 0; k < each; ++k) out[first + k * BLOCK] = value[k];
    } else {
      for (unsigned k = 0; k < each; ++k) {
        if (first + k * BLOCK < n) out[first + k * BLOCK] = value[k];
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    scale_1(float a, const float* x, float* out, unsigned n) {
  walk<1>(Scale{a}, x, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    scale_2(float a, const float* x, float* out, unsigned n) {
  walk<2>(Scale{a}, x, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    scale_4(float a, const float* x, float* out, unsigned n) {
  walk<4>(Scale{a}, x, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    scale_8(float a, const float* x, float* out, unsigned n) {
  walk<8>(Scale{a}, x, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    iterate_1(float a, const float* x, float* out, unsigned n) {
  walk<1>(Iterate{a}, x, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    iterate_2(float a, const float* x, float* out, unsigned n) {
  walk<2>(Iterate{a}, x, out, n);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    iterate_4(float a, const float* x, float* out, unsigned n) {
  walk<4>(Iterate{a}, x, out, n);
}
