// The gradient of cross entropy.

#pragma once

#include "exponential.h"

// the largest of eight
ALWAYS float largest(v8 v) {
  v8 w = {v[4], v[5], v[6], v[7], v[0], v[1], v[2], v[3]};
  v = w > v ? w : v;
  w = v8{v[2], v[3], v[0], v[1], v[6], v[7], v[4], v[5]};
  v = w > v ? w : v;
  return v[1] > v[0] ? v[1] : v[0];
}

// In the place of a row's outputs: softmax, less 1 at the label. The row is filled up to a multiple of 8, with zeros when done.
// Whole vectors are written and read: one that was written in parts can't be read before it has left for the cache.
static inline void softmax_less_label(float* row, i64 classes, i64 label) {
  const i64 wide = (classes + 7) / 8 * 8;
  const m8 lane = {0, 1, 2, 3, 4, 5, 6, 7};
  const auto there = [=](i64 c) { return lane + static_cast<std::int32_t>(c) < static_cast<std::int32_t>(classes); };
  v8 tops = all(-INFINITY);
  for (i64 c = 0; c < wide; c += 8) {
    const v8 v = there(c) ? load(row + c) : all(-INFINITY);
    tops = tops > v ? tops : v;
  }
  const float top = largest(tops);
  v8 sums = all(0);
  for (i64 c = 0; c < wide; c += 8) {
    const v8 e = exponential((there(c) ? load(row + c) : all(-INFINITY)) - top);
    store(row + c, e);
    sums += e;
  }
  float sum = 0;
  for (int k = 0; k < 8; k++) sum += sums[k];
  const float scale = 1 / sum;
  for (i64 c = 0; c < wide; c += 8) {
    const v8 p = load(row + c) * scale;
    store(row + c, lane + static_cast<std::int32_t>(c) == static_cast<std::int32_t>(label) ? p - 1 : p);
  }
}
