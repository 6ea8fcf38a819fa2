// What products are made of: numbers of float32, or two at a time that are rounded to bfloat16, which a processor that knows
// them multiplies and adds at once. Sums are float32 in either case.
//
// Two of bfloat16 are as wide as a float32: their product is the same loop, half as long.

#pragma once

#include <type_traits>

#include "room.h"
#include "vectors.h"

#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

struct Two {
  std::uint16_t first, second;
};

// how many factors `count` numbers make; a last one without another has 0 beside it
template <class Factor> i64 factors_of(i64 count);
template <> inline i64 factors_of<float>(i64 count) { return count; }
template <> inline i64 factors_of<Two>(i64 count) { return (count + 1) / 2; }

// to the nearest bfloat16, of two to the even one; NaN stays NaN
ALWAYS std::uint16_t lowered(float number) {
  std::uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  const std::uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
  return static_cast<std::uint16_t>(number != number ? quiet : rounded);
}

// the i-th factor of numbers that at(0), at(1), … are
template <class Factor, class At> ALWAYS Factor factor(i64 i, i64 count, At at) {
  if constexpr (std::is_same_v<Factor, float>) return at(i);
  else return {lowered(at(2 * i)), 2 * i + 1 < count ? lowered(at(2 * i + 1)) : std::uint16_t{0}};
}

// as vectors: some that lie side by side, or the same one everywhere
template <class T> ALWAYS T load_factors(const float* p) { return load<T>(p); }
template <class T> ALWAYS integers<T> load_factors(const Two* p) {
  integers<T> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class T> ALWAYS T all_factors(float x) { return all<T>(x); }
template <class T> ALWAYS integers<T> all_factors(Two x) {
  std::int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return integers<T>{} + bits;
}

// Rounded once, wherever the processor can: compilers leave out some if left to themselves, GCC where it tunes for Zen.
template <class T> ALWAYS T plus_product(T sum, T a, T b) {
#ifdef __AVX512F__
  if constexpr (sizeof(T) == 64) return (T)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#endif
#ifdef __FMA__
  if constexpr (sizeof(T) == 4) return __builtin_fmaf(a, b, sum);
  if constexpr (sizeof(T) == 32) return (T)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#endif
  return sum + a * b;
}
template <class T> ALWAYS T plus_product(T sum, integers<T> a, integers<T> b) {
#ifdef __AVX512BF16__
  if constexpr (sizeof(T) == 64) return (T)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  else return (T)_mm256_dpbf16_ps((__m256)sum, (__m256bh)a, (__m256bh)b);
#else
  constexpr std::int32_t high = -65536;  // a bfloat16 is the upper half of a float32
  return sum + (T)(a & high) * (T)(b & high) + (T)(a << 16) * (T)(b << 16);
#endif
}

// A row of numbers, each with its neighbour.
static inline void lower_row(const float* row, i64 count, Two* to) {
  i64 i = 0;
#ifdef __AVX512BF16__
  for (; i + 32 <= count; i += 32) {
    const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(row + i + 16), _mm512_loadu_ps(row + i));
    std::memcpy(to + i / 2, &both, sizeof both);
  }
#endif
  for (; i < count; i += 2) to[i / 2] = factor<Two>(i / 2, count, [=](i64 k) { return row[k]; });
}

// Two rows, each number with the one below it; no second row is zeros.
static inline void lower_rows(const float* first, const float* second, i64 count, Two* to) {
  i64 i = 0;
#ifdef __AVX512BF16__
  alignas(64) static constexpr std::int16_t in_turn[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                           8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_load_si512(in_turn);
  for (; i + 16 <= count; i += 16) {
    const __m512 below = second ? _mm512_loadu_ps(second + i) : _mm512_setzero_ps();
    const __m512bh both = _mm512_cvtne2ps_pbh(below, _mm512_loadu_ps(first + i));
    _mm512_storeu_si512(to + i, _mm512_permutexvar_epi16(order, (__m512i)both));
  }
#endif
  for (; i < count; i++) to[i] = {lowered(first[i]), second ? lowered(second[i]) : std::uint16_t{0}};
}

// A matrix as factors of neighbours in its rows, or in its columns: [rows][factors of a row], [factors of a column][columns].
static inline const float* as_factors(const float* x, i64, i64, Room<float>&) { return x; }
static inline const Two* as_factors(const float* x, i64 rows, i64 columns, Room<Two>& room) {
  const i64 depth = factors_of<Two>(columns);
  Two* to = room.make(rows * depth);
  if (columns % 2 == 0) lower_row(x, rows * columns, to);
  else
    for (i64 r = 0; r < rows; r++) lower_row(x + r * columns, columns, to + r * depth);
  return to;
}
static inline const float* as_factors_of_columns(const float* x, i64, i64, Room<float>&) { return x; }
static inline const Two* as_factors_of_columns(const float* x, i64 rows, i64 columns, Room<Two>& room) {
  Two* to = room.make(factors_of<Two>(rows) * columns);
  for (i64 r = 0; r < rows; r += 2)
    lower_rows(x + r * columns, r + 1 < rows ? x + (r + 1) * columns : nullptr, columns, to + r / 2 * columns);
  return to;
}
