// An LSTM: one layer in one direction, there and back, step by step.
//
// Everything lies [row][time][…], so that the rows of a client are one matrix for the gradients of weights (clients.cpp).
// 4 · hidden: a multiple of 8.

#include <algorithm>
#include <vector>

#include "exponential.h"
#include "products.h"

ALWAYS v8 bounded_exponential(v8 x) {  // e^x between e^−87 and e^88, and NaN
  const v8 low = all(-87.0f), high = all(88.0f), magic = all(12582912.0f);
  x = low > x ? low : x;
  x = high < x ? high : x;
  const v8 shifted = x * 1.44269504f + magic;
  const v8 p = after_twos(x, shifted - magic);
  return p * (v8)(((m8)shifted << 23) + 0x3f800000);  // a product, for NaN to stay
}

ALWAYS v8 sigmoid(v8 x) { return 1.0f / (1.0f + bounded_exponential(-x)); }

ALWAYS v8 hyperbolic(v8 x) {  // tanh: a polynomial near 0, where 1 − 2/(e^2x + 1) would lose digits
  const v8 z = x * x;
  v8 p = all(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z + -5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z + -3.33332819422e-1f;
  const v8 small = p * z * x + x;
  const v8 large = 1.0f - 2.0f / (bounded_exponential(x + x) + 1.0f);
  return z < 0.390625f ? small : large;
}

ALWAYS void copy_some(float* to, const float* from, i64 n) {  // n < 8, in pieces of a fixed size
  if (n & 4) std::memcpy(to, from, 16);
  if (n & 2) std::memcpy(to + (n & 4), from + (n & 4), 8);
  if (n & 1) to[n & 6] = from[n & 6];
}
ALWAYS v8 load_some(const float* p, i64 n) {  // the first n of eight, else zeros
  if (n >= 8) return load(p);
  float values[8] = {};
  copy_some(values, p, n);
  return load(values);
}
ALWAYS void store_some(float* p, v8 v, i64 n) {
  if (n >= 8) return store(p, v);
  float values[8];
  store(values, v);
  copy_some(p, values, n);
}

// f(k, how many) for k = 0, 8, …; how many is a constant but for the rest, so that no branch is left in the loop
template <class F> ALWAYS void eight_by_eight(i64 size, F f) {
  i64 k = 0;
  for (; k + 8 <= size; k += 8) f(k, std::integral_constant<i64, 8>{});
  if (k < size) f(k, size - k);
}

// x [row][time][features] → gates i, f, g, o [row][time][4 hidden]; h, c, tanh c and the h before each step
// [row][time][hidden], but h with strides of its own. w_in [group][4 hidden][features], w [group][4 hidden][hidden],
// bias [group][4 hidden] or null.
extern "C" void lstm(const float* x, const float* w_in, float* gates, const float* w, const float* bias, float* h,
                     float* before, float* c, float* tanh_c, i64 groups, const i64* ends, i64 w_in_stride, i64 w_stride,
                     i64 bias_stride, i64 time, i64 features, i64 hidden, i64 backwards, i64 h_row, i64 h_time) {
  const i64 four = 4 * hidden;
  std::vector<float> packed, packed_in;
  std::vector<const float*> from, from_in;
  i64 first = 0;
  for (i64 g = 0; g < groups; g++) {
    const i64 rows = ends[g] - first;
    const float* wg = w + g * w_stride;
    const float* bg = bias ? bias + g * bias_stride : nullptr;
    const float* wi = w_in + g * w_in_stride;
    pack(packed, hidden, four, [&](i64 k, i64 o) { return wg[o * hidden + k]; });
    pack(packed_in, features, four, [&](i64 k, i64 o) { return wi[o * features + k]; });
    from.resize(rows), from_in.resize(rows);
    for (i64 step = 0; step < time; step++) {
      const i64 t = backwards ? time - 1 - step : step, previous = backwards ? t + 1 : t - 1;
      const i64 ahead = step + 1 == time ? 0 : backwards ? -1 : 1;
      float* z = gates + (first * time + t) * four;
      for (i64 r = 0; r < rows; r++) {
        float* to = before + ((first + r) * time + t) * hidden;
        from[r] = to;
        from_in[r] = x + ((first + r) * time + t) * features;
        if (step) std::memcpy(to, h + (first + r) * h_row + previous * h_time, hidden * sizeof(float));
        else std::fill(to, to + hidden, 0.0f);
      }
      multiply(from_in.data(), rows, features, packed_in.data(), 0, true, bg, 0, z, time * four, four);
      if (step) multiply(from.data(), rows, hidden, packed.data(), 0, true, z, time * four, z, time * four, four);
      for (i64 r = 0; r < rows; r++) {
        float* zr = z + r * time * four;
        float* hr = h + (first + r) * h_row + t * h_time;
        const i64 at = ((first + r) * time + t) * hidden, at_previous = ((first + r) * time + previous) * hidden;
        for (i64 q = 0; q < 4; q++)  // gate by gate, so that many short chains of operations are under way at once
          eight_by_eight(hidden, [&](i64 k, auto n) __attribute__((always_inline)) {
            const v8 part = load_some(zr + q * hidden + k, n);
            store_some(zr + q * hidden + k, q == 2 ? hyperbolic(part) : sigmoid(part), n);
          });
        eight_by_eight(hidden, [&](i64 k, auto n) __attribute__((always_inline)) {
          v8 state = load_some(zr + k, n) * load_some(zr + 2 * hidden + k, n);
          if (step) state += load_some(zr + hidden + k, n) * load_some(c + at_previous + k, n);
          const v8 squashed = hyperbolic(state);
          store_some(c + at + k, state, n), store_some(tanh_c + at + k, squashed, n);
          store_some(hr + k, load_some(zr + 3 * hidden + k, n) * squashed, n);
          // rows lie far apart: no hardware guesses that the next time step is wanted next
          for (i64 q = 0; q < 4; q++) __builtin_prefetch(zr + ahead * four + q * hidden + k);
          __builtin_prefetch(c + at + ahead * hidden + k), __builtin_prefetch(tanh_c + at + ahead * hidden + k);
        });
      }
    }
    first = ends[g];
  }
}

// dgates [row][time][4 hidden] from dh [row][time][hidden] and dc, that of the last state [row][hidden], which is used up
extern "C" void lstm_back(const float* gates, const float* w, const float* c, const float* tanh_c, const float* dh, float* dc,
                          float* dgates, i64 groups, const i64* ends, i64 w_stride, i64 time, i64 hidden, i64 backwards,
                          i64 dh_row, i64 dh_time) {
  const i64 four = 4 * hidden, wide = filled(hidden);
  std::vector<float> packed, recurrent;
  std::vector<const float*> from;
  i64 first = 0;
  for (i64 g = 0; g < groups; g++) {
    const i64 rows = ends[g] - first;
    const float* wg = w + g * w_stride;
    pack(packed, four, hidden, [&](i64 k, i64 o) { return wg[k * hidden + o]; });
    from.resize(rows);
    recurrent.assign(rows * wide, 0.0f);
    for (i64 step = time - 1; step >= 0; step--) {
      const i64 t = backwards ? time - 1 - step : step, previous = backwards ? t + 1 : t - 1;
      const i64 ahead = step == 0 ? 0 : backwards ? 1 : -1;
      for (i64 r = 0; r < rows; r++) {
        const i64 row = first + r, at = (row * time + t) * hidden, at_previous = (row * time + previous) * hidden;
        const float* z = gates + (row * time + t) * four;
        const float* dhr = dh + row * dh_row + t * dh_time;
        float* d = dgates + (row * time + t) * four;
        from[r] = d;
        eight_by_eight(hidden, [&](i64 k, auto n) __attribute__((always_inline)) {
          const v8 i = load_some(z + k, n), f = load_some(z + hidden + k, n);
          const v8 u = load_some(z + 2 * hidden + k, n), o = load_some(z + 3 * hidden + k, n);
          const v8 squashed = load_some(tanh_c + at + k, n);
          const v8 up = load_some(dhr + k, n) + load(&recurrent[r * wide + k]);
          const v8 state = load_some(dc + row * hidden + k, n) + up * o * (1.0f - squashed * squashed);
          const v8 old = step ? load_some(c + at_previous + k, n) : all(0);
          store_some(d + k, state * u * i * (1.0f - i), n);
          store_some(d + hidden + k, state * old * f * (1.0f - f), n);
          store_some(d + 2 * hidden + k, state * i * (1.0f - u * u), n);
          store_some(d + 3 * hidden + k, up * squashed * o * (1.0f - o), n);
          store_some(dc + row * hidden + k, state * f, n);
          for (i64 q = 0; q < 4; q++) __builtin_prefetch(z + ahead * four + q * hidden + k);
          __builtin_prefetch(c + at + 2 * ahead * hidden + k), __builtin_prefetch(tanh_c + at + ahead * hidden + k);
          for (i64 q = 0; q < 4; q++) __builtin_prefetch(d + ahead * four + q * hidden + k, 1);
        });
      }
      if (step) multiply(from.data(), rows, four, packed.data(), 0, true, nullptr, 0, recurrent.data(), wide, wide);
    }
    first = ends[g];
  }
}
