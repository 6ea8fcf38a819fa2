// The gradient of cross entropy.

#pragma once

#include "exponential.h"

// In the place of a row's outputs: softmax, less 1 at the label. The row is filled up to a multiple of 8, with zeros when done.
static inline void softmax_less_label(float* row, i64 classes, i64 label) {
  const i64 wide = (classes + 7) / 8 * 8;
  float top = row[0];
  for (i64 c = 1; c < classes; c++) top = row[c] > top ? row[c] : top;
  for (i64 c = classes; c < wide; c++) row[c] = -INFINITY;
  v8 sums = all(0);
  for (i64 c = 0; c < wide; c += 8) {
    const v8 e = exponential(load(row + c) - top);
    store(row + c, e);
    sums += e;
  }
  float sum = 0;
  for (int k = 0; k < 8; k++) sum += sums[k];
  const float scale = 1 / sum;
  for (i64 c = 0; c < wide; c += 8) store(row + c, load(row + c) * scale);
  row[label] -= 1;
}
