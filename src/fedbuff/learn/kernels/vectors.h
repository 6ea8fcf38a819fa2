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
#define ALWAYS_MEMBER inline __attribute__((always_inline))

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
template <class T> using integers = decltype(T{} < T{});  // as many integers of the same size

// How a vector of numbers is read and written: all of it,
template <class T> struct Whole {
  using type = T;
  T get(const float* p) const { return load<T>(p); }
  void put(float* p, T v) const { store<T>(p, v); }
};
// all but its first numbers, which were done before: those stay as they are,
template <class T> struct Rest {
  using type = T;
  integers<T> done;
  T get(const float* p) const { return load<T>(p); }
  void put(float* p, T v) const { store<T>(p, done ? load<T>(p) : v); }
};
// or its first n < 8 numbers, which are all there are
struct Few {
  using type = narrow;
  i64 n;
  narrow get(const float* p) const {
    float values[8] = {};
    std::memcpy(values, p, n * sizeof(float));
    return load<narrow>(values);
  }
  void put(float* p, narrow v) const { std::memcpy(p, &v, n * sizeof(float)); }
};

// f(first, how) for vectors of T that cover `size` numbers, at least as many as a vector has
template <class T, class F> ALWAYS void in_vectors(i64 size, F f) {
  i64 k = 0;
  for (; k + lanes<T> <= size; k += lanes<T>) f(k, Whole<T>{});
  if (k == size) return;
  Rest<T> rest;
  for (i64 i = 0; i < lanes<T>; i++) rest.done[i] = i < k - (size - lanes<T>) ? -1 : 0;
  f(size - lanes<T>, rest);
}
// the same for any number of them: what is read more than once must not be written before, unless by the same vector
template <class F> ALWAYS void in_vectors(i64 size, F f) {
  if (size >= W) in_vectors<wide>(size, f);
  else if (size >= 8) in_vectors<narrow>(size, f);
  else f(0, Few{size});
}
