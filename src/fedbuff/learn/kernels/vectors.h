// Vectors of float32, eight numbers long; where the processor has vectors of sixteen, products are computed with them:
// each number is still the same sum in the same order.
//
// NaN and infinities must come through: no flag may assume finite numbers, and comparisons are written so that NaN wins.

#pragma once

#include <cstdint>
#include <cstring>

using i64 = std::int64_t;
typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef std::int32_t m8 __attribute__((vector_size(32)));
typedef float narrow __attribute__((vector_size(32)));
#ifdef __AVX512F__
typedef float wide __attribute__((vector_size(64)));
#else
typedef narrow wide;
#endif
constexpr i64 W = sizeof(wide) / sizeof(float);

#define UNROLL _Pragma("GCC unroll 16")
#define ALWAYS static inline __attribute__((always_inline))

ALWAYS v8 load(const float* p) { return *reinterpret_cast<const v8*>(p); }
ALWAYS void store(float* p, v8 v) { *reinterpret_cast<v8*>(p) = v; }
ALWAYS v8 all(float x) { return v8{x, x, x, x, x, x, x, x}; }
template <class T> constexpr i64 lanes = sizeof(T) / sizeof(float);
// for vectors of either length: a template's argument forgets that it may lie anywhere, so copies
template <class T> ALWAYS T load(const float* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class T> ALWAYS void store(float* p, T v) { std::memcpy(p, &v, sizeof v); }
template <class T> ALWAYS T all(float x) { return x - T{}; }
