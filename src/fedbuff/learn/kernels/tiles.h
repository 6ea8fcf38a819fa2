// Every product is computed tile by tile: up to TALL rows of two vectors, whose sums stay in registers.

#pragma once

#include <type_traits>

#include "vectors.h"

constexpr int TALL = W == 8 ? 6 : 8;

// how many of `left` columns, a multiple of 8, are computed at a time
ALWAYS i64 block_of(i64 left) { return left >= 2 * W ? 2 * W : left >= W ? W : 8; }

// f(vector type, how many of them) for a block of so many columns
template <class F> ALWAYS void with_block(i64 columns, F f) {
  if (columns == 2 * W) f(wide{}, std::integral_constant<int, 2>{});
  else if (columns == W) f(wide{}, std::integral_constant<int, 1>{});
  else f(narrow{}, std::integral_constant<int, 1>{});
}

// f(n) with n a constant, for 1 ≤ n ≤ TALL
template <int N = TALL, class F> ALWAYS void with_constant(i64 n, F f) {
  if (n == N) f(std::integral_constant<int, N>{});
  else if constexpr (N > 1) with_constant<N - 1>(n, f);
}

// f(first, how many) for `count` things in tiles of at most TALL, about equally many in each
template <class F> ALWAYS void in_tiles(i64 count, F f) {
  for (i64 first = 0, tiles = (count + TALL - 1) / TALL; tiles > 0; tiles--) {
    const i64 height = (count - first + tiles - 1) / tiles;
    with_constant(height, [&](auto n) __attribute__((always_inline)) { f(first, n); });
    first += height;
  }
}
