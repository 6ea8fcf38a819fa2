// An LSTM: one layer in one direction, there and back, step by step, for rows that see the same weights.
//
// Gates and states lie [row][time][…], so that the rows of a client are one matrix for the gradients of weights. Where h, its
// gradient and the input lie is up to the caller: h(row, time) is a pointer.
// 4 · hidden: a multiple of 8.

#pragma once

#include <algorithm>
#include <vector>

#include "exponential.h"
#include "products.h"

struct Lstm {
  i64 time, features, hidden;
  bool backwards;

  i64 four() const { return 4 * hidden; }
  i64 at(i64 step) const { return backwards ? time - 1 - step : step; }  // the time of a step
  i64 before(i64 t) const { return backwards ? t + 1 : t - 1; }
};

// vectors of numbers that lie [row][time][…] with strides of their own
template <class Number> struct Steps {
  Number* start;
  i64 row, time;
  Number* operator()(i64 r, i64 t) const { return start + r * row + t * time; }
};

// Rows that are as another one for a while: `as[r]`, an earlier row, up to time `until[r]`.
struct Alike {
  std::vector<i64> as, until;
};

// From what the gates' sums begin with, x → gates i, f, g, o [row][time][4 hidden]; h; c and tanh c [row][time][hidden].
// begin(t, z, rows, which) sets them, z(i), to what the inputs at time t make of so many rows, `which`. Weights as `pack` leaves them.
template <class Begin, class H, class Factor>
static void lstm_rows(const Lstm& l, i64 rows, Begin begin, const Factor* w, float* gates, H h, float* c, float* tanh_c,
                      const Alike* alike = nullptr) {
  const i64 four = l.four(), hidden = l.hidden;
  std::vector<i64> which;
  std::vector<const float*> from;
  for (i64 step = 0; step < l.time; step++) {
    const i64 t = l.at(step), previous = l.before(t), ahead = step + 1 == l.time ? 0 : l.backwards ? -1 : 1;
    which.clear(), from.clear();
    for (i64 r = 0; r < rows; r++) {
      if (alike && step < alike->until[r]) continue;
      which.push_back(r);
      if (step) from.push_back(h(r, previous));
    }
    const i64 count = static_cast<i64>(which.size());
    const Rows<float> z{gates + t * four, l.time * four, which.data()};
    begin(t, z, count, which.data());
    if (step) multiply(from.data(), count, hidden, w, {z.first, z.stride, z.listed}, z, four);
    for (const i64 r : which) {
      float* zr = gates + (r * l.time + t) * four;
      float* hr = h(r, t);
      float* cr = c + (r * l.time + t) * hidden;
      float* squashed_r = tanh_c + (r * l.time + t) * hidden;
      const float* old = c + (r * l.time + previous) * hidden;  // at the first step it is nowhere, and not read
      in_vectors(hidden, [&](i64 k, auto how) __attribute__((always_inline)) {
        using T = typename decltype(how)::type;
        const T i = sigmoid<T>(how.get(zr + k)), f = sigmoid<T>(how.get(zr + hidden + k));
        const T u = hyperbolic<T>(how.get(zr + 2 * hidden + k)), o = sigmoid<T>(how.get(zr + 3 * hidden + k));
        T state = i * u;
        if (step) state += f * how.get(old + k);
        const T squashed = hyperbolic<T>(state);
        how.put(zr + k, i), how.put(zr + hidden + k, f), how.put(zr + 2 * hidden + k, u), how.put(zr + 3 * hidden + k, o);
        how.put(cr + k, state), how.put(squashed_r + k, squashed), how.put(hr + k, o * squashed);
        // rows lie far apart: no hardware guesses that the next time step is wanted next
        for (i64 q = 0; q < 4; q++) __builtin_prefetch(zr + ahead * four + q * hidden + k, 1);
        __builtin_prefetch(cr + ahead * hidden + k, 1), __builtin_prefetch(squashed_r + ahead * hidden + k, 1);
      });
    }
    for (i64 r = 0; count < rows && r < rows; r++) {
      if (step >= alike->until[r]) continue;
      const i64 to = r * l.time + t, as = alike->as[r] * l.time + t;
      std::copy_n(gates + as * four, four, gates + to * four);
      std::copy_n(c + as * hidden, hidden, c + to * hidden), std::copy_n(tanh_c + as * hidden, hidden, tanh_c + to * hidden);
      std::copy_n(h(alike->as[r], t), hidden, h(r, t));
    }
  }
}

// `begin` of `lstm_rows` by a product: x(row, time) is an input. Weights as `pack` leaves them; bias or null.
template <class X, class Factor> struct Inputs {
  const Lstm& l;
  X x;
  const Factor* w;
  const float* bias;
  std::vector<const float*> from;
  void operator()(i64 t, Rows<float> z, i64 count, const i64* which) {
    from.resize(count);
    for (i64 i = 0; i < count; i++) from[i] = x(which[i], t);
    multiply(from.data(), count, l.features, w, {bias, 0}, z, l.four());
  }
};

// The gradients of what the gates were made of, in the place of the gates. From dh, that of each h, and dc, that of the last
// state [row][hidden], which is used up; w as `pack` leaves its transpose.
template <class D, class Factor>
static void lstm_rows_back(const Lstm& l, i64 rows, float* gates, const Factor* w, const float* c, const float* tanh_c, D dh,
                           float* dc) {
  const i64 four = l.four(), hidden = l.hidden, wide = filled(hidden);
  std::vector<const float*> from(rows);
  std::vector<float> recurrent(rows * wide);
  for (i64 step = l.time - 1; step >= 0; step--) {
    const i64 t = l.at(step), previous = l.before(t), ahead = step == 0 ? 0 : l.backwards ? 1 : -1;
    for (i64 r = 0; r < rows; r++) {
      const i64 at = (r * l.time + t) * hidden;
      const float* old = c + (r * l.time + previous) * hidden;
      const float* dhr = dh(r, t);
      float* z = gates + (r * l.time + t) * four;
      float* dcr = dc + r * hidden;
      from[r] = z;
      in_vectors(hidden, [&](i64 k, auto how) __attribute__((always_inline)) {
        using T = typename decltype(how)::type;
        const T i = how.get(z + k), f = how.get(z + hidden + k), u = how.get(z + 2 * hidden + k), o = how.get(z + 3 * hidden + k);
        const T squashed = how.get(tanh_c + at + k);
        const T up = how.get(dhr + k) + how.get(&recurrent[r * wide + k]);
        const T state = how.get(dcr + k) + up * o * (1.0f - squashed * squashed);
        const T was = step ? how.get(old + k) : T{};
        how.put(z + k, state * u * i * (1.0f - i));
        how.put(z + hidden + k, state * was * f * (1.0f - f));
        how.put(z + 2 * hidden + k, state * i * (1.0f - u * u));
        how.put(z + 3 * hidden + k, up * squashed * o * (1.0f - o));
        how.put(dcr + k, state * f);
        for (i64 q = 0; q < 4; q++) __builtin_prefetch(z + ahead * four + q * hidden + k, 1);
        __builtin_prefetch(c + at + 2 * ahead * hidden + k), __builtin_prefetch(tanh_c + at + ahead * hidden + k);
      });
    }
    if (step) multiply(from.data(), rows, four, w, {nullptr, 0}, {recurrent.data(), wide}, wide);
  }
}

// pairs for the gradient of weights: what came of the gates' sums at each step of some rows, [row][time][4 hidden], and the
// input of that step, or the h before it
template <class X> struct Pairs {
  const Lstm& l;
  const float* dgates;
  i64 rows;
  X x;
  bool before;
  template <class F> ALWAYS_MEMBER void operator()(F f) const {
    const i64 from = before && !l.backwards ? 1 : 0, to = before && l.backwards ? l.time - 1 : l.time;
    const i64 shift = !before ? 0 : l.backwards ? 1 : -1;
    for (i64 r = 0; r < rows; r++)
      for (i64 t = from; t < to; t++) f(dgates + (r * l.time + t) * l.four(), x(r, t + shift));
  }
};
