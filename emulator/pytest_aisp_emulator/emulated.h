// CUDA C++ for g++: compiler.py compiles a page's .cu after this file.
// Threads, barriers and the record of every access are in emulated.cpp.
#pragma once

#include <assert.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__
#define __noinline__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// g++ drops the section of a template's variables: compiler.py moves .bss, where all of these are.
#define __shared__ static
#define EMULATED_GLOBAL __attribute__((section("emulated_global")))

// Built-in variables and vectors.

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

constexpr size_t emulated_align(size_t bytes) { return bytes < 16 ? bytes : 16; }

#define EMULATED_VECTORS(T, name)                                               \
  struct name##1 {                                                              \
    T x;                                                                        \
  };                                                                            \
  struct alignas(2 * sizeof(T)) name##2 {                                       \
    T x, y;                                                                     \
  };                                                                            \
  struct alignas(emulated_align(4 * sizeof(T))) name##4 {                       \
    T x, y, z, w;                                                               \
  };                                                                            \
  inline name##1 make_##name##1(T x) { return {x}; }                            \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                    \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }            \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
#define EMULATED_THREES(T, name) \
  struct name##3 {               \
    T x, y, z;                   \
  };                             \
  EMULATED_VECTORS(T, name)

EMULATED_THREES(signed char, char)
EMULATED_THREES(unsigned char, uchar)
EMULATED_THREES(short, short)
EMULATED_THREES(unsigned short, ushort)
EMULATED_THREES(int, int)
EMULATED_VECTORS(unsigned, uint)
EMULATED_THREES(long, long)
EMULATED_THREES(unsigned long, ulong)
EMULATED_THREES(long long, longlong)
EMULATED_THREES(unsigned long long, ulonglong)
EMULATED_THREES(float, float)
EMULATED_THREES(double, double)

// Functions of emulated.cpp that a thread calls.

#define EMULATED_UNSEEN __attribute__((no_sanitize("thread")))  // not a kernel's access

namespace emulated {
constexpr int MOST_SHARED = 227 * 1024;
extern char dynamic_shared[];

struct Votes {
  int count, every, any;
};

struct Lanes {
  unsigned present;  // lanes that took part
  uint64_t values[32];
};

Votes barrier(const char* what, int vote, int line);
void grid_barrier(int line);
const Lanes& meet(const char* what, unsigned mask, uint64_t value, int line);
unsigned lane();
unsigned alive();
void atomic(const void* at, size_t bytes);
void fence();
void copy_later(void* to, const void* from, size_t bytes, size_t zeros);
void commit_copies();
void wait_copies(unsigned but);
[[noreturn]] void fail(const char* form, ...);

template <typename T>
uint64_t bits(T value) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  uint64_t held = 0;
  memcpy(&held, &value, sizeof(T));
  return held;
}

template <typename T>
T value(const Lanes& lanes, unsigned from) {
  uint64_t held = lanes.present >> from & 1 ? lanes.values[from] : ~uint64_t(0);  // else garbage
  T result;
  memcpy(&result, &held, sizeof(T));
  return result;
}

template <typename T, typename Op>
EMULATED_UNSEEN T atomically(T* at, Op op) {
  atomic(at, sizeof(T));
  T old;
  __builtin_memcpy(&old, at, sizeof(T));
  T now = op(old);
  __builtin_memcpy(at, &now, sizeof(T));
  return old;
}

template <typename... P, size_t... I>
EMULATED_UNSEEN void unpack(void (*kernel)(P...), void** args, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_const_t<P>*>(args[I])...);
}

template <typename... P>
void unpack(void (*kernel)(P...), void** args) {
  unpack(kernel, args, std::index_sequence_for<P...>());
}
}  // namespace emulated

// Barriers, shuffles and votes.

#define EMULATED_LINE int line = __builtin_LINE()

inline void __syncthreads(EMULATED_LINE) { emulated::barrier("__syncthreads", 0, line); }
inline int __syncthreads_count(int vote, EMULATED_LINE) {
  return emulated::barrier("__syncthreads_count", vote, line).count;
}
inline int __syncthreads_and(int vote, EMULATED_LINE) {
  return emulated::barrier("__syncthreads_and", vote, line).every;
}
inline int __syncthreads_or(int vote, EMULATED_LINE) {
  return emulated::barrier("__syncthreads_or", vote, line).any;
}
inline void __syncwarp(unsigned mask = ~0u, EMULATED_LINE) {
  emulated::meet("__syncwarp", mask, 0, line);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATED_LINE) {
  const auto& lanes = emulated::meet("__shfl_sync", mask, emulated::bits(value), line);
  const unsigned first = emulated::lane() & ~(width - 1);
  return emulated::value<T>(lanes, first + (source & (width - 1)));
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATED_LINE) {
  const auto& lanes = emulated::meet("__shfl_up_sync", mask, emulated::bits(value), line);
  const unsigned lane = emulated::lane(), at = lane & (width - 1);
  return emulated::value<T>(lanes, delta <= at ? lane - delta : lane);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATED_LINE) {
  const auto& lanes = emulated::meet("__shfl_down_sync", mask, emulated::bits(value), line);
  const unsigned lane = emulated::lane(), at = lane & (width - 1);
  return emulated::value<T>(lanes, at + delta < unsigned(width) ? lane + delta : lane);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32, EMULATED_LINE) {
  const auto& lanes = emulated::meet("__shfl_xor_sync", mask, emulated::bits(value), line);
  const unsigned lane = emulated::lane(), from = lane ^ with;
  return emulated::value<T>(lanes, from <= (lane | unsigned(width - 1)) ? from : lane);
}

namespace emulated {
template <typename T, typename Op>
T reduced(const Lanes& lanes, Op op) {
  T total{};
  bool first = true;
  for (unsigned from = 0; from < 32; ++from) {
    if (!(lanes.present >> from & 1)) continue;
    total = first ? value<T>(lanes, from) : op(total, value<T>(lanes, from));
    first = false;
  }
  return total;
}

inline unsigned voted(const Lanes& lanes) {
  unsigned votes = 0;
  for (unsigned from = 0; from < 32; ++from) {
    if (lanes.present >> from & 1 && lanes.values[from]) votes |= 1u << from;
  }
  return votes;
}
}  // namespace emulated

inline unsigned __ballot_sync(unsigned mask, int vote, EMULATED_LINE) {
  return emulated::voted(emulated::meet("__ballot_sync", mask, vote != 0, line));
}
inline int __any_sync(unsigned mask, int vote, EMULATED_LINE) {
  return emulated::voted(emulated::meet("__any_sync", mask, vote != 0, line)) != 0;
}
inline int __all_sync(unsigned mask, int vote, EMULATED_LINE) {
  const auto& lanes = emulated::meet("__all_sync", mask, vote != 0, line);
  return emulated::voted(lanes) == lanes.present;
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value, EMULATED_LINE) {
  const auto& lanes = emulated::meet("__match_any_sync", mask, emulated::bits(value), line);
  unsigned same = 0;
  for (unsigned from = 0; from < 32; ++from) {
    const bool here = lanes.present >> from & 1;
    if (here && lanes.values[from] == emulated::bits(value)) same |= 1u << from;
  }
  return same;
}
#define EMULATED_REDUCE(name, expression)                                                 \
  template <typename T>                                                                   \
  T __reduce_##name##_sync(unsigned mask, T value, EMULATED_LINE) {                       \
    const auto& lanes =                                                                   \
        emulated::meet("__reduce_" #name "_sync", mask, emulated::bits(value), line);     \
    return emulated::reduced<T>(lanes, [](T a, T b) -> T { return expression; });         \
  }
EMULATED_REDUCE(add, a + b)
EMULATED_REDUCE(min, a < b ? a : b)
EMULATED_REDUCE(max, a < b ? b : a)
EMULATED_REDUCE(and, a& b)
EMULATED_REDUCE(or, a | b)
EMULATED_REDUCE(xor, a ^ b)
inline unsigned __activemask() { return emulated::alive(); }

// Atomics and fences.

#define EMULATED_ATOMIC(name, result)                                     \
  template <typename T>                                                   \
  T atomic##name(T* at, std::common_type_t<T> given) {                    \
    return emulated::atomically(at, [&](T old) -> T { return result; });  \
  }                                                                       \
  template <typename T>                                                   \
  T atomic##name##_block(T* at, std::common_type_t<T> given) {            \
    return atomic##name(at, given);                                       \
  }
EMULATED_ATOMIC(Add, old + given)
EMULATED_ATOMIC(Sub, old - given)
EMULATED_ATOMIC(Max, old < given ? given : old)
EMULATED_ATOMIC(Min, given < old ? given : old)
EMULATED_ATOMIC(Exch, given)
EMULATED_ATOMIC(And, old& given)
EMULATED_ATOMIC(Or, old | given)
EMULATED_ATOMIC(Xor, old ^ given)
EMULATED_ATOMIC(Inc, old >= given ? 0 : old + 1)
EMULATED_ATOMIC(Dec, old == 0 || old > given ? given : old - 1)
template <typename T>
T atomicCAS(T* at, std::common_type_t<T> expected, std::common_type_t<T> given) {
  return emulated::atomically(at, [&](T old) -> T { return old == expected ? given : old; });
}
inline void __threadfence() { emulated::fence(); }
inline void __threadfence_system() { emulated::fence(); }
inline void __threadfence_block() {}

// Loads and stores with a cache hint. Asynchronous copies are done when they are waited for.

#define EMULATED_LOAD(name) \
  template <typename T>     \
  T name(const T* at) {     \
    return *at;             \
  }
#define EMULATED_STORE(name)                         \
  template <typename T>                              \
  void name(T* at, std::common_type_t<T> value) {    \
    *at = value;                                     \
  }
EMULATED_LOAD(__ldg)
EMULATED_LOAD(__ldca)
EMULATED_LOAD(__ldcg)
EMULATED_LOAD(__ldcs)
EMULATED_LOAD(__ldcv)
EMULATED_LOAD(__ldlu)
EMULATED_STORE(__stwb)
EMULATED_STORE(__stcg)
EMULATED_STORE(__stcs)
EMULATED_STORE(__stwt)

inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes, size_t zeros = 0) {
  emulated::copy_later(to, from, bytes, zeros);
}
inline void __pipeline_commit() { emulated::commit_copies(); }
inline void __pipeline_wait_prior(unsigned but) { emulated::wait_copies(but); }

// Arithmetic.

#define EMULATED_MINMAX(name, float_name, expression)                        \
  template <typename A, typename B>                                          \
  std::common_type_t<A, B> name(A first, B second) {                         \
    using T = std::common_type_t<A, B>;                                      \
    const T a = first, b = second;                                           \
    if constexpr (std::is_floating_point_v<T>) return std::float_name(a, b); \
    return expression;                                                       \
  }
EMULATED_MINMAX(min, fmin, b < a ? b : a)
EMULATED_MINMAX(max, fmax, a < b ? b : a)

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned result = 0;
  for (int bit = 0; bit < 32; ++bit) result |= (x >> bit & 1) << (31 - bit);
  return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return uint64_t(high) << 32 << (by & 31) >> 32 | uint64_t(low) << (by & 31) >> 32;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return (uint64_t(high) << 32 | low) >> (by & 31);
}
inline int __mulhi(int a, int b) { return int64_t(a) * b >> 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t(a) * b >> 32; }
inline int __mul24(int a, int b) { return a * b; }
inline int __dp4a(int a, int b, int c) {
  for (int at = 0; at < 32; at += 8) c += int8_t(a >> at) * int8_t(b >> at);
  return c;
}

template <typename To, typename From>
To emulated_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}
inline int __float_as_int(float x) { return emulated_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return emulated_cast<unsigned>(x); }
inline float __int_as_float(int x) { return emulated_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return emulated_cast<float>(x); }
inline long long __double_as_longlong(double x) { return emulated_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return emulated_cast<double>(x); }
inline int __float2int_rn(float x) { return int(rintf(x)); }
inline int __float2int_rz(float x) { return int(x); }
inline int __float2int_rd(float x) { return int(floorf(x)); }
inline int __float2int_ru(float x) { return int(ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return unsigned(rintf(x)); }
inline unsigned __float2uint_rz(float x) { return unsigned(x); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }

inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __frsqrt_rn(float x) { return 1 / sqrtf(x); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float rcbrtf(float x) { return 1 / cbrtf(x); }
inline float sinpif(float x) { return float(sin(M_PI * x)); }
inline float cospif(float x) { return float(cos(M_PI * x)); }
inline float normcdff(float x) { return erfcf(-x * float(M_SQRT1_2)) / 2; }
// glibc declares some of these names.
#define __expf expf
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __log10f log10f
#define __powf powf
#define __sinf sinf
#define __cosf cosf
#define __tanf tanf
#define __sincosf sincosf
#define CUDART_INF_F __builtin_inff()
#define CUDART_INF __builtin_inf()
#define CUDART_NAN_F __builtin_nanf("")

inline long long clock64() { return 0; }
inline unsigned __nanosleep(unsigned) { return 0; }
[[noreturn]] inline void __trap() { emulated::fail("__trap()"); }
#define __builtin_assume(x)

// Half and bfloat16: stored narrow, computed in float, rounded after each operation as on a GPU.

struct __nv_bfloat16 {
  uint16_t held;
  __nv_bfloat16() = default;
  __nv_bfloat16(float x) {
    const unsigned given = __float_as_uint(x);
    held = x != x ? 0x7fff : (given + 0x7fff + (given >> 16 & 1)) >> 16;
  }
  operator float() const { return __uint_as_float(unsigned(held) << 16); }
};
struct __half {
  _Float16 held;
  __half() = default;
  __half(float x) : held(_Float16(x)) {}
  operator float() const { return float(held); }
};

#define EMULATED_NARROW(T, T2, name, to, to2, both)                                             \
  struct alignas(4) T2 {                                                                        \
    T x, y;                                                                                     \
  };                                                                                            \
  inline T to(float x) { return T(x); }                                                         \
  inline T to##_rn(float x) { return T(x); }                                                    \
  inline float name##2float(T x) { return float(x); }                                           \
  inline T2 to2(float x, float y) { return {T(x), T(y)}; }                                      \
  inline T2 both##_rn(float2 v) { return {T(v.x), T(v.y)}; }                                    \
  inline float __low2float(T2 v) { return v.x; }                                                \
  inline float __high2float(T2 v) { return v.y; }                                               \
  inline T operator+(T a, T b) { return T(float(a) + float(b)); }                               \
  inline T operator-(T a, T b) { return T(float(a) - float(b)); }                               \
  inline T operator*(T a, T b) { return T(float(a) * float(b)); }                               \
  inline T operator/(T a, T b) { return T(float(a) / float(b)); }                               \
  inline T& operator+=(T& a, T b) { return a = a + b; }                                         \
  inline T& operator*=(T& a, T b) { return a = a * b; }                                         \
  inline T __hadd(T a, T b) { return a + b; }                                                   \
  inline T __hsub(T a, T b) { return a - b; }                                                   \
  inline T __hmul(T a, T b) { return a * b; }                                                   \
  inline T __hmax(T a, T b) { return T(max(float(a), float(b))); }                              \
  inline T __hmin(T a, T b) { return T(min(float(a), float(b))); }                              \
  inline T __hfma(T a, T b, T c) { return T(float(double(a) * float(b) + float(c))); }          \
  inline T2 __hadd2(T2 a, T2 b) { return {a.x + b.x, a.y + b.y}; }                              \
  inline T2 __hsub2(T2 a, T2 b) { return {a.x - b.x, a.y - b.y}; }                              \
  inline T2 __hmul2(T2 a, T2 b) { return {a.x * b.x, a.y * b.y}; }                              \
  inline T2 __hmax2(T2 a, T2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }                \
  inline T2 __hfma2(T2 a, T2 b, T2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
EMULATED_NARROW(__half, __half2, __half, __float2half, __floats2half2_rn, __float22half2)
EMULATED_NARROW(__nv_bfloat16, __nv_bfloat162, __bfloat16, __float2bfloat16,
                __floats2bfloat162_rn, __float22bfloat162)
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }
inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
using half = __half;
using half2 = __half2;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

namespace cooperative_groups {
struct grid_group {
  void sync(EMULATED_LINE) const { emulated::grid_barrier(line); }
};
inline grid_group this_grid() { return {}; }
}  // namespace cooperative_groups

namespace cuda {
namespace std = ::std;
}
