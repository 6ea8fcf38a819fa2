// Products of small matrices, by tiles.

#pragma once

#include <algorithm>
#include <vector>

#include "tiles.h"

ALWAYS i64 filled(i64 n) { return (n + 7) / 8 * 8; }

// Weights as products want them: blocks of columns, the last filled up with zeros to a multiple of 8, [block][k][columns of the
// block]; block(first, count, size, to) writes so many of `size` columns.
template <class Block> static void in_blocks(std::vector<float>& packed, i64 k, i64 columns, Block block) {
  packed.resize(k * filled(columns));
  for (i64 first = 0, size; first < columns; first += size) {
    size = block_of(filled(columns) - first);
    const i64 count = std::min(size, columns - first);
    float* to = &packed[first * k];
    block(first, count, size, to);
    for (i64 o = count; o < size; o++)
      for (i64 i = 0; i < k; i++) to[i * size + o] = 0.0f;
  }
}
// w [k][columns], for x w
static inline void pack(std::vector<float>& packed, const float* w, i64 k, i64 columns) {
  in_blocks(packed, k, columns, [=](i64 first, i64 count, i64 size, float* to) {
    for (i64 i = 0; i < k; i++) std::memcpy(to + i * size, w + i * columns + first, count * sizeof(float));
  });
}
// w [columns][k], for x wᵀ
static inline void pack_turned(std::vector<float>& packed, const float* w, i64 k, i64 columns) {
  in_blocks(packed, k, columns, [=](i64 first, i64 count, i64 size, float* to) {
    for (i64 i = 0; i < k; i++)
      for (i64 o = 0; o < count; o++) to[i * size + o] = w[(first + o) * k + i];
  });
}

// Rows of a matrix: one after another, or those whose numbers are listed; with a stride of 0 it is the same one every time.
template <class Number> struct Rows {
  Number* first;
  i64 stride;
  const i64* listed = nullptr;
  Number* operator()(i64 r) const { return first + (listed ? listed[r] : r) * stride; }
};

// c[row][V vectors] = start + Σ_k a[row][k] b[k][V vectors], for P rows given by pointers; no start is zero
template <class T, int P, int V>
ALWAYS void rows_times(const float* const* a, i64 k, const float* b, i64 b_stride, const float* const* start, float* const* c) {
  constexpr i64 N = lanes<T>;
  T sum[P][V];
  UNROLL for (int p = 0; p < P; p++)
    UNROLL for (int v = 0; v < V; v++) sum[p][v] = start[p] ? load<T>(start[p] + N * v) : T{};
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
  UNROLL for (int p = 0; p < P; p++) UNROLL for (int v = 0; v < V; v++) store<T>(c[p] + N * v, sum[p][v]);
}

// c = start + a b for a block of columns that begins at `o`, b [k][block]
static void rows_times_block(i64 block, const float* const* a, i64 rows, i64 k, const float* b, i64 b_stride,
                             Rows<const float> start, Rows<float> c, i64 o) {
  with_block(block, [&](auto vector, auto v) {
    in_tiles(rows, [&](i64 r, auto n) __attribute__((always_inline)) {
      const float* from[n];
      float* to[n];
      UNROLL for (int p = 0; p < n; p++) from[p] = start.first ? start(r + p) + o : nullptr, to[p] = c(r + p) + o;
      rows_times<decltype(vector), n, v>(a + r, k, b, b_stride, from, to);
    });
  });
}

// c = start + a b; columns: a multiple of 8; with `packed`, b lies as `pack` leaves it, else its rows are b_stride apart
static void multiply(const float* const* a, i64 rows, i64 k, const float* b, i64 b_stride, bool packed, Rows<const float> start,
                     Rows<float> c, i64 columns) {
  for (i64 o = 0, size; o < columns; o += size) {
    size = block_of(columns - o);
    rows_times_block(size, a, rows, k, packed ? b + o * k : b + o, packed ? size : b_stride, start, c, o);
  }
}

// c[C][V vectors] = Σ a[C] ⊗ b[V vectors] over pairs of rows: each(f) calls f(a, b) for them, in order
template <class T, int C, int V, class Each> ALWAYS void outer_rows(Each each, i64 at, i64 o, float* c, i64 c_stride) {
  constexpr i64 N = lanes<T>;
  T sum[C][V] = {};
  each([&](const float* a, const float* b) __attribute__((always_inline)) {
    T bv[V];
    UNROLL for (int v = 0; v < V; v++) bv[v] = load<T>(b + o + N * v);
    UNROLL for (int i = 0; i < C; i++) {
      const T x = all<T>(a[at + i]);
      UNROLL for (int v = 0; v < V; v++) sum[i][v] += x * bv[v];
    }
  });
  UNROLL for (int i = 0; i < C; i++) UNROLL for (int v = 0; v < V; v++) store<T>(c + i * c_stride + N * v, sum[i][v]);
}

// c[k][columns] = aᵀ b over pairs of rows; columns: at least 8
template <class Each> static void transposed_times(Each each, i64 k, float* c, i64 c_stride, i64 columns) {
  in_tiles(k, [&](i64 i, auto n) __attribute__((always_inline)) {
    for (i64 o = 0, size; o < columns; o += size) {
      size = block_of(columns - o);
      // a matrix that is cold: have the lines of the next tile but one ready to be written
      const float* later = c + (i + 2 * n) * c_stride;
      for (i64 line = n * o; line < n * (o + size); line += 16) __builtin_prefetch(later + line, 1);
      o = std::min(o, columns - size);  // the last one may overlap what is done, and finds the same
      float* to = c + i * c_stride + o;
      with_block(size, [&](auto vector, auto v) __attribute__((always_inline)) {
        outer_rows<decltype(vector), n, v>(each, i, o, to, c_stride);
      });
    }
  });
}

// c[k][columns] = β c + aᵀ b over pairs of rows, for any number of columns
template <class Each>
static void outer_product(Each each, i64 k, i64 columns, float* c, i64 beta, std::vector<float>& scratch) {
  float* to = c;
  if (beta) {
    scratch.resize(k * columns);
    to = scratch.data();
  }
  if (columns < 8)
    for (i64 i = 0; i < k; i++)
      for (i64 o = 0; o < columns; o++) {
        float sum = 0;
        each([&](const float* a, const float* b) { sum += a[i] * b[o]; });
        to[i * columns + o] = sum;
      }
  else transposed_times(each, k, to, columns, columns);
  if (beta)
    for (i64 i = 0; i < k * columns; i++) c[i] += to[i];
}

// rows of a and b that lie so far apart
struct Apart {
  const float *a, *b;
  i64 rows, a_stride, b_stride;
  template <class F> ALWAYS_MEMBER void operator()(F f) const {
    const float *p = a, *q = b;
    for (i64 r = 0; r < rows; r++, p += a_stride, q += b_stride) f(p, q);
  }
};
