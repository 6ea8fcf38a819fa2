// LSTM layers of any model: groups of rows that see weights of their own, one after another.

#include "lstm.h"

// x [row][time][features]; the gates, c and tanh c as `lstm_rows` leaves them; h with strides of its own. w_in [group][4
// hidden][features], w [group][4 hidden][hidden], bias [group][4 hidden] or null.
extern "C" void lstm(const float* x, const float* w_in, float* gates, const float* w, const float* bias, float* h, float* c,
                     float* tanh_c, i64 groups, const i64* ends, i64 w_in_stride, i64 w_stride, i64 bias_stride, i64 time,
                     i64 features, i64 hidden, i64 backwards, i64 h_row, i64 h_time) {
  const Lstm l{time, features, hidden, backwards != 0};
  std::vector<float> packed, packed_in;
  for (i64 g = 0, first = 0; g < groups; first = ends[g++]) {
    pack_turned(packed, w + g * w_stride, hidden, l.four());
    pack_turned(packed_in, w_in + g * w_in_stride, features, l.four());
    const Steps<const float> seen{x + first * time * features, time * features, features};
    lstm_rows(l, ends[g] - first,
              Inputs<Steps<const float>>{l, seen, packed_in.data(), bias ? bias + g * bias_stride : nullptr, {}}, packed.data(),
              gates + first * time * l.four(), Steps<float>{h + first * h_row, h_row, h_time}, c + first * time * hidden,
              tanh_c + first * time * hidden);
  }
}

extern "C" void lstm_back(float* gates, const float* w, const float* c, const float* tanh_c, const float* dh, float* dc,
                          i64 groups, const i64* ends, i64 w_stride, i64 time, i64 hidden, i64 backwards, i64 dh_row,
                          i64 dh_time) {
  const Lstm l{time, 0, hidden, backwards != 0};
  std::vector<float> packed;
  for (i64 g = 0, first = 0; g < groups; first = ends[g++]) {
    pack(packed, w + g * w_stride, l.four(), hidden);
    lstm_rows_back(l, ends[g] - first, gates + first * time * l.four(), packed.data(), c + first * time * hidden,
                   tanh_c + first * time * hidden, Steps<const float>{dh + first * dh_row, dh_row, dh_time},
                   dc + first * hidden);
  }
}

// into[place of client][4 hidden][features] = β into + the gradient of weights that saw x, or with `before` h one step earlier
extern "C" void lstm_weights(const float* dgates, const float* x, float* into, i64 clients, const i64* ends, const i64* places,
                             i64 into_stride, i64 beta, i64 time, i64 features, i64 hidden, i64 backwards, i64 before,
                             i64 x_row, i64 x_time) {
  const Lstm l{time, features, hidden, backwards != 0};
  std::vector<float> scratch;
  for (i64 c = 0, row = 0; c < clients; row = ends[c++])
    outer_product(Pairs<Steps<const float>>{l, dgates + row * time * l.four(), ends[c] - row,
                                            {x + row * x_row, x_row, x_time}, before != 0},
                  l.four(), features, into + places[c] * into_stride, beta, scratch);
}
