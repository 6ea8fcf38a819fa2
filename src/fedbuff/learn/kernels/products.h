// Products of small matrices, by tiles.

#pragma once

#include <algorithm>
#include <vector>

#include "tiles.h"

ALWAYS i64 filled(i64 n) { return (n + 7) / 8 * 8; }

// blocks of columns, the last filled up with zeros to a multiple of 8: [block][k][columns of the block]
template <class F> static void pack(std::vector<float>& packed, i64 k, i64 columns, F weight) {
  packed.assign(k * filled(columns), 0.0f);
  for (i64 first = 0, size; first < columns; first += size) {
    size = block_of(filled(columns) - first);
    for (i64 o = first; o < std::min(first + size, columns); o++)
      for (i64 i = 0; i < k; i++) packed[first * k + i * size + o - first] = weight(i, o);
  }
}

// c[row][V vectors] = start + Σ_k a[row][k] b[k][V vectors], for P rows given by pointers
template <class T, int P, int V>
ALWAYS void rows_times(const float* const* a, i64 k, const float* b, i64 b_stride, const float* start, i64 start_stride,
                       float* c, i64 c_stride) {
  constexpr i64 N = lanes<T>;
  T sum[P][V];
  UNROLL for (int p = 0; p < P; p++)
    UNROLL for (int v = 0; v < V; v++) sum[p][v] = start ? load<T>(start + p * start_stride + N * v) : T{};
  const float* as[P];
  UNROLL for (int p = 0; p < P; p++) as[p] = a[p];
  for (i64 i = 0; i < k; i++, b += b_stride) {
    T bv[V];
    UNROLL for (int v = 0; v < V; v++) bv[v] = load<T>(b + N * v);
    UNROLL for (int p = 0; p < P; p++) {
      const T x = all<T>(as[p][i]);
      UNROLL for (int v = 0; v < V; v++) sum[p][v] += x * bv[v];
    }
  }
  UNROLL for (int p = 0; p < P; p++) UNROLL for (int v = 0; v < V; v++) store<T>(c + p * c_stride + N * v, sum[p][v]);
}

// c = start + a b for a block of columns, b [k][block]; start_stride 0: the same start for every row
static void rows_times_block(i64 block, const float* const* a, i64 rows, i64 k, const float* b, i64 b_stride,
                             const float* start, i64 start_stride, float* c, i64 c_stride) {
  with_block(block, [&](auto vector, auto v) {
    in_tiles(rows, [&](i64 r, auto n) __attribute__((always_inline)) {
      const float* s = start ? start + r * start_stride : nullptr;
      rows_times<decltype(vector), n, v>(a + r, k, b, b_stride, s, start_stride, c + r * c_stride, c_stride);
    });
  });
}

// c = start + a b; columns: a multiple of 8; with `packed`, b lies as `pack` leaves it, else its rows are b_stride apart
static void multiply(const float* const* a, i64 rows, i64 k, const float* b, i64 b_stride, bool packed, const float* start,
                     i64 start_stride, float* c, i64 c_stride, i64 columns) {
  for (i64 o = 0, size; o < columns; o += size) {
    size = block_of(columns - o);
    rows_times_block(size, a, rows, k, packed ? b + o * k : b + o, packed ? size : b_stride, start ? start + o : nullptr,
                     start_stride, c + o, c_stride);
  }
}

// c[C][V vectors] = Σ over rows of a[row][C] ⊗ b[row][V vectors]
template <class T, int C, int V>
ALWAYS void outer_rows(const float* const* a, i64 at, i64 rows, const float* b, i64 b_stride, float* c, i64 c_stride) {
  constexpr i64 N = lanes<T>;
  T sum[C][V] = {};
  for (i64 r = 0; r < rows; r++, b += b_stride) {
    T bv[V];
    UNROLL for (int v = 0; v < V; v++) bv[v] = load<T>(b + N * v);
    UNROLL for (int i = 0; i < C; i++) {
      const T x = all<T>(a[r][at + i]);
      UNROLL for (int v = 0; v < V; v++) sum[i][v] += x * bv[v];
    }
  }
  UNROLL for (int i = 0; i < C; i++) UNROLL for (int v = 0; v < V; v++) store<T>(c + i * c_stride + N * v, sum[i][v]);
}

// c[k][columns] = aᵀ b; columns: at least 8
static void transposed_times(const float* const* a, i64 rows, i64 k, const float* b, i64 b_stride, float* c, i64 c_stride,
                             i64 columns) {
  in_tiles(k, [&](i64 i, auto n) __attribute__((always_inline)) {
    for (i64 o = 0, size; o < columns; o += size) {
      size = block_of(columns - o);
      o = std::min(o, columns - size);  // the last one may overlap what is done, and finds the same
      float* to = c + i * c_stride + o;
      // a matrix that is cold: have the lines of the next tile but one ready to be written
      for (i64 r = 2 * TALL; r < 3 * TALL; r++) __builtin_prefetch(to + r * c_stride, 1);
      with_block(size, [&](auto vector, auto v) __attribute__((always_inline)) {
        outer_rows<decltype(vector), n, v>(a, i, rows, b + o, b_stride, to, c_stride);
      });
    }
  });
}

// c[a columns][b columns] = β c + aᵀ b, for any number of columns; rows lie a_stride and b_stride apart
static void outer_product(const float* a, i64 a_stride, i64 k, const float* b, i64 b_stride, i64 columns, i64 rows, float* c,
                          i64 beta, std::vector<const float*>& pointers, std::vector<float>& scratch) {
  if (columns < 8) {
    for (i64 i = 0; i < k; i++)
      for (i64 o = 0; o < columns; o++) {
        float sum = 0;
        for (i64 r = 0; r < rows; r++) sum += a[r * a_stride + i] * b[r * b_stride + o];
        c[i * columns + o] = (beta ? c[i * columns + o] : 0.0f) + sum;
      }
    return;
  }
  pointers.resize(rows);
  for (i64 r = 0; r < rows; r++) pointers[r] = a + r * a_stride;
  float* to = c;
  if (beta) {
    scratch.resize(k * columns);
    to = scratch.data();
  }
  transposed_times(pointers.data(), rows, k, b, b_stride, to, columns, columns);
  if (beta)
    for (i64 i = 0; i < k * columns; i++) c[i] += to[i];
}
