// Gradients of a layer's weights, client by client.

#include <algorithm>
#include <vector>

#include "products.h"

template <class Factor>
static void outer_of_each(const float* a, const float* b, float* into, i64 clients, const i64* ends, const i64* places,
                          i64 into_stride, i64 a_columns, i64 b_columns, i64 beta) {
  Scratch<Factor> scratch;
  for (i64 c = 0, row = 0; c < clients; row = ends[c++])
    outer_product(Apart<float>{a + row * a_columns, b + row * b_columns, ends[c] - row, a_columns, b_columns}, a_columns,
                  b_columns, into + places[c] * into_stride, beta, scratch);
}

// into[place of client][a columns][b columns] = β into + aᵀ b over the client's rows; with `low`, products are of bfloat16
extern "C" void outer_products(const float* a, const float* b, float* into, i64 clients, const i64* ends, const i64* places,
                               i64 into_stride, i64 a_columns, i64 b_columns, i64 beta, i64 low) {
  const auto each = low ? outer_of_each<Two> : outer_of_each<float>;
  each(a, b, into, clients, ends, places, into_stride, a_columns, b_columns, beta);
}

// into[place of client][columns] = β into + Σ a over the client's rows
extern "C" void client_sums(const float* a, float* into, i64 clients, const i64* ends, const i64* places, i64 into_stride,
                            i64 columns, i64 beta) {
  for (i64 c = 0, row = 0; c < clients; c++) {
    float* to = into + places[c] * into_stride;
    if (!beta) std::fill(to, to + columns, 0.0f);
    for (; row < ends[c]; row++)
      for (i64 i = 0; i < columns; i++) to[i] += a[row * columns + i];
  }
}
