// Products of small matrices, by tiles, of factors of either kind.

#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "factors.h"
#include "tiles.h"

ALWAYS i64 filled(i64 n) { return (n + 7) / 8 * 8; }

// Weights as products want them: blocks of columns, the last filled up with zeros to a multiple of 8, [block][depth][columns
// of the block].
//
// w [k][columns], for x w
template <class Factor> static void pack(std::vector<Factor>& packed, const float* w, i64 k, i64 columns) {
  Room<Factor> room;
  const Factor* factors = as_factors_of_columns(w, k, columns, room);
  const i64 depth = factors_of<Factor>(k);
  packed.resize(depth * filled(columns));
  for (i64 first = 0, size; first < columns; first += size) {
    size = block_of(filled(columns) - first);
    const i64 count = std::min(size, columns - first);
    Factor* to = &packed[first * depth];
    for (i64 i = 0; i < depth; i++, to += size) {
      std::copy_n(factors + i * columns + first, count, to);
      std::fill(to + count, to + size, Factor{});
    }
  }
}

// eight by eight numbers of 32 bits, whatever they mean: to[i][o] = from[o][i]
ALWAYS void turn(const void* from, i64 from_stride, void* to, i64 to_stride) {
  narrow a[8], b[8];
  UNROLL for (int i = 0; i < 8; i++) a[i] = load<narrow>(static_cast<const float*>(from) + i * from_stride);
  UNROLL for (int i = 0; i < 8; i += 2) {  // pairs, within halves
    const narrow x = a[i], y = a[i + 1];
    b[i] = narrow{x[0], y[0], x[1], y[1], x[4], y[4], x[5], y[5]};
    b[i + 1] = narrow{x[2], y[2], x[3], y[3], x[6], y[6], x[7], y[7]};
  }
  UNROLL for (int i = 0; i < 8; i += 4)
    UNROLL for (int j = 0; j < 2; j++) {  // fours
      const narrow x = b[i + j], y = b[i + j + 2];
      a[i + 2 * j] = narrow{x[0], x[1], y[0], y[1], x[4], x[5], y[4], y[5]};
      a[i + 2 * j + 1] = narrow{x[2], x[3], y[2], y[3], x[6], x[7], y[6], y[7]};
    }
  UNROLL for (int i = 0; i < 4; i++) {  // halves
    const narrow x = a[i], y = a[i + 4];
    store<narrow>(static_cast<float*>(to) + i * to_stride, narrow{x[0], x[1], x[2], x[3], y[0], y[1], y[2], y[3]});
    store<narrow>(static_cast<float*>(to) + (i + 4) * to_stride, narrow{x[4], x[5], x[6], x[7], y[4], y[5], y[6], y[7]});
  }
}

// w [columns][k], for x wᵀ
template <class Factor> static void pack_turned(std::vector<Factor>& packed, const float* w, i64 k, i64 columns) {
  static_assert(sizeof(Factor) == sizeof(float));
  Room<Factor> room;
  const i64 depth = factors_of<Factor>(k);
  const Factor* factors = as_factors(w, columns, k, room);
  packed.resize(depth * filled(columns));
  for (i64 first = 0, size; first < columns; first += size) {
    size = block_of(filled(columns) - first);
    Factor* to = &packed[first * depth];
    for (i64 o = 0; o < size; o += 8)
      for (i64 i = 0; i < depth; i += 8) {
        if (const i64 from = std::min(i, depth - 8); from >= 0 && first + o + 8 <= columns) {  // it may overlap what is done
          turn(factors + (first + o) * depth + from, depth, to + from * size + o, size);
          continue;
        }
        for (i64 p = i; p < std::min(i + 8, depth); p++)
          for (i64 q = o; q < o + 8; q++) to[p * size + q] = first + q < columns ? factors[(first + q) * depth + p] : Factor{};
      }
  }
}

// Rows of a matrix: one after another, or those whose numbers are listed; with a stride of 0 it is the same one every time.
template <class Number> struct Rows {
  Number* first;
  i64 stride;
  const i64* listed = nullptr;
  Number* operator()(i64 r) const { return first + (listed ? listed[r] : r) * stride; }
};

// c[row][V vectors] = start + Σ_k a[row][k] b[k][V vectors], for P rows given by pointers; no start is zero
template <class T, int P, int V, class Factor>
ALWAYS void rows_times(const Factor* const* a, i64 k, const Factor* b, i64 b_stride, const float* const* start, float* const* c) {
  constexpr i64 N = lanes<T>;
  T sum[P][V];
  UNROLL for (int p = 0; p < P; p++)
    UNROLL for (int v = 0; v < V; v++) sum[p][v] = start[p] ? load<T>(start[p] + N * v) : T{};
  const Factor* as[P];
  UNROLL for (int p = 0; p < P; p++) as[p] = a[p];
  for (i64 i = 0; i < k; i++, b += b_stride) {
    decltype(load_factors<T>(b)) bv[V];
    UNROLL for (int v = 0; v < V; v++) bv[v] = load_factors<T>(b + N * v);
    UNROLL for (int p = 0; p < P; p++) {
      const auto x = all_factors<T>(as[p][i]);
      UNROLL for (int v = 0; v < V; v++) sum[p][v] = plus_product<T>(sum[p][v], x, bv[v]);
    }
  }
  UNROLL for (int p = 0; p < P; p++) UNROLL for (int v = 0; v < V; v++) store<T>(c[p] + N * v, sum[p][v]);
}

// c = start + a b for a block of columns that begins at `o`, b [k][block]
template <class Factor>
static void rows_times_block(i64 block, const Factor* const* a, i64 rows, i64 k, const Factor* b, i64 b_stride,
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

// c = start + a b; columns: a multiple of 8; rows of b are b_stride apart,
static inline void multiply(const float* const* a, i64 rows, i64 k, const float* b, i64 b_stride, Rows<const float> start,
                            Rows<float> c, i64 columns) {
  for (i64 o = 0, size; o < columns; o += size) {
    size = block_of(columns - o);
    rows_times_block(size, a, rows, k, b + o, b_stride, start, c, o);
  }
}
// or b lies as `pack` leaves it
template <class Factor>
static void multiply(const float* const* a, i64 rows, i64 k, const Factor* packed, Rows<const float> start, Rows<float> c,
                     i64 columns) {
  const i64 depth = factors_of<Factor>(k);
  const Factor* const* factors;
  Room<Two> low;
  std::vector<const Two*> lows;
  if constexpr (std::is_same_v<Factor, float>) {
    factors = a;
  } else {
    Two* to = low.make(rows * depth);
    for (i64 r = 0; r < rows; r++, to += depth) lower_row(a[r], k, to), lows.push_back(to);
    factors = lows.data();
  }
  for (i64 o = 0, size; o < columns; o += size) {
    size = block_of(columns - o);
    rows_times_block(size, factors, rows, depth, packed + o * depth, size, start, c, o);
  }
}

// c[C][V vectors] = Σ a[C] ⊗ b[V vectors] over pairs of rows: each(f) calls f(a, b) for them, in order
template <class T, int C, int V, class Each> ALWAYS void outer_rows(Each each, i64 at, i64 o, float* c, i64 c_stride) {
  constexpr i64 N = lanes<T>;
  T sum[C][V] = {};
  each([&](const auto* a, const auto* b) __attribute__((always_inline)) {
    decltype(load_factors<T>(b)) bv[V];
    UNROLL for (int v = 0; v < V; v++) bv[v] = load_factors<T>(b + o + N * v);
    UNROLL for (int i = 0; i < C; i++) {
      const auto x = all_factors<T>(a[at + i]);
      UNROLL for (int v = 0; v < V; v++) sum[i][v] = plus_product<T>(sum[i][v], x, bv[v]);
    }
  });
  UNROLL for (int i = 0; i < C; i++) UNROLL for (int v = 0; v < V; v++) store<T>(c + i * c_stride + N * v, sum[i][v]);
}

// the same turned over, for a few columns: c[C · V vectors][T] = Σ a[V vectors] ⊗ b[T]
template <class T, int C, int V, class Each> ALWAYS void outer_columns(Each each, i64 at, i64 o, float* c, i64 c_stride) {
  constexpr i64 N = lanes<T>;
  T sum[V][C] = {};
  each([&](const auto* a, const auto* b) __attribute__((always_inline)) {
    decltype(load_factors<T>(a)) av[V];
    UNROLL for (int v = 0; v < V; v++) av[v] = load_factors<T>(a + at + N * v);
    UNROLL for (int i = 0; i < C; i++) {
      const auto x = all_factors<T>(b[o + i]);
      UNROLL for (int v = 0; v < V; v++) sum[v][i] = plus_product<T>(sum[v][i], av[v], x);
    }
  });
  for (int v = 0; v < V; v++)
    for (i64 n = 0; n < N; n++) UNROLL for (int i = 0; i < C; i++) c[(N * v + n) * c_stride + i] = sum[v][i][n];
}

// c[k][columns] = aᵀ b over pairs of rows; columns: at least 8
template <class Each> static void transposed_times(Each each, i64 k, float* c, i64 c_stride, i64 columns) {
  const i64 few = k >= W ? columns % 8 : 0;  // columns that would fill a vector by less than half, if rows can fill it
  in_tiles(k, [&](i64 i, auto n) __attribute__((always_inline)) {
    for (i64 o = 0, size; o < columns - few; o += size) {
      size = block_of(columns - few - o);
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
  with_constant<7>(few, [&](auto n) __attribute__((always_inline)) {
    constexpr int V = n > 4 ? 2 : 4;
    const i64 o = columns - n;
    i64 i = 0;
    for (; i + V * W <= k; i += V * W) outer_columns<wide, n, V>(each, i, o, c + i * c_stride + o, c_stride);
    for (; i < k; i += W) {
      i = std::min(i, k - W);
      outer_columns<wide, n, 1>(each, i, o, c + i * c_stride + o, c_stride);
    }
  });
}

// rows of a and b that lie so far apart
template <class Factor> struct Apart {
  const Factor *a, *b;
  i64 rows, a_stride, b_stride;
  template <class F> ALWAYS_MEMBER void operator()(F f) const {
    const Factor *p = a, *q = b;
    for (i64 r = 0; r < rows; r++, p += a_stride, q += b_stride) f(p, q);
  }
};

// rows of a and b as they are, or two of them at a time
template <class Factor> struct Lowered;
template <> struct Lowered<float> {
  template <class Each> Each operator()(Each each, i64, i64) { return each; }
};
template <> struct Lowered<Two> {
  Room<Two> a, b;
  std::vector<std::pair<const float*, const float*>> found;
  template <class Each> Apart<Two> operator()(Each each, i64 a_columns, i64 b_columns) {
    found.clear();
    each([&](const float* p, const float* q) { found.emplace_back(p, q); });
    const i64 rows = static_cast<i64>(found.size()), half = factors_of<Two>(rows);
    found.emplace_back(nullptr, nullptr);
    Two *a_to = a.make(half * a_columns), *b_to = b.make(half * b_columns);
    for (i64 r = 0; r < half; r++) {
      const auto [p, q] = found[2 * r];
      const auto [p_next, q_next] = found[2 * r + 1];
      lower_rows(p, p_next, a_columns, a_to + r * a_columns), lower_rows(q, q_next, b_columns, b_to + r * b_columns);
    }
    return {a_to, b_to, half, a_columns, b_columns};
  }
};

// What products of many clients use again.
template <class Factor> struct Scratch {
  Lowered<Factor> lowered;
  std::vector<float> sum;
};

// c[k][columns] = β c + aᵀ b over pairs of rows, for any number of columns; where these are few, nothing is rounded
template <class Factor, class Each>
static void outer_product(Each rows, i64 k, i64 columns, float* c, i64 beta, Scratch<Factor>& scratch) {
  float* to = c;
  if (beta) {
    scratch.sum.resize(k * columns);
    to = scratch.sum.data();
  }
  if (columns < 8)
    for (i64 i = 0; i < k; i++)
      for (i64 o = 0; o < columns; o++) {
        float sum = 0;
        rows([&](const float* a, const float* b) { sum = plus_product<float>(sum, a[i], b[o]); });
        to[i * columns + o] = sum;
      }
  else transposed_times(scratch.lowered(rows, k, columns), k, to, columns, columns);
  if (beta)
    for (i64 i = 0; i < k * columns; i++) c[i] += to[i];
}
