// LSTM layers of any model: groups of rows that see weights of their own, one after another. With `low`, products are of
// bfloat16.

#include "lstm.h"

template <class Factor>
static void groups_there(const Lstm& l, const float* x, const float* w_in, float* gates, const float* w, const float* bias,
                         Steps<float> h, float* c, float* tanh_c, i64 groups, const i64* ends, i64 w_in_stride, i64 w_stride,
                         i64 bias_stride) {
  std::vector<Factor> packed, packed_in;
  for (i64 g = 0, first = 0; g < groups; first = ends[g++]) {
    pack_turned(packed, w + g * w_stride, l.hidden, l.four());
    pack_turned(packed_in, w_in + g * w_in_stride, l.features, l.four());
    const Steps<const float> seen{x + first * l.time * l.features, l.time * l.features, l.features};
    const Inputs<Steps<const float>, Factor> begin{l, seen, packed_in.data(), bias ? bias + g * bias_stride : nullptr, {}};
    lstm_rows(l, ends[g] - first, begin, packed.data(), gates + first * l.time * l.four(),
              Steps<float>{h(first, 0), h.row, h.time}, c + first * l.time * l.hidden, tanh_c + first * l.time * l.hidden);
  }
}

// x [row][time][features]; the gates, c and tanh c as `lstm_rows` leaves them; h with strides of its own. w_in [group][4
// hidden][features], w [group][4 hidden][hidden], bias [group][4 hidden] or null.
extern "C" void lstm(const float* x, const float* w_in, float* gates, const float* w, const float* bias, float* h, float* c,
                     float* tanh_c, i64 groups, const i64* ends, i64 w_in_stride, i64 w_stride, i64 bias_stride, i64 time,
                     i64 features, i64 hidden, i64 backwards, i64 h_row, i64 h_time, i64 low) {
  const auto there = low ? groups_there<Two> : groups_there<float>;
  there({time, features, hidden, backwards != 0}, x, w_in, gates, w, bias, {h, h_row, h_time}, c, tanh_c, groups, ends,
        w_in_stride, w_stride, bias_stride);
}

template <class Factor>
static void groups_back(const Lstm& l, float* gates, const float* w, const float* c, const float* tanh_c,
                        Steps<const float> dh, float* dc, i64 groups, const i64* ends, i64 w_stride) {
  std::vector<Factor> packed;
  for (i64 g = 0, first = 0; g < groups; first = ends[g++]) {
    pack(packed, w + g * w_stride, l.four(), l.hidden);
    const i64 states = first * l.time * l.hidden;
    lstm_rows_back(l, ends[g] - first, gates + first * l.time * l.four(), packed.data(), c + states, tanh_c + states,
                   Steps<const float>{dh(first, 0), dh.row, dh.time}, dc + first * l.hidden);
  }
}

extern "C" void lstm_back(float* gates, const float* w, const float* c, const float* tanh_c, const float* dh, float* dc,
                          i64 groups, const i64* ends, i64 w_stride, i64 time, i64 hidden, i64 backwards, i64 dh_row,
                          i64 dh_time, i64 low) {
  const auto back = low ? groups_back<Two> : groups_back<float>;
  back({time, 0, hidden, backwards != 0}, gates, w, c, tanh_c, {dh, dh_row, dh_time}, dc, groups, ends, w_stride);
}

template <class Factor>
static void clients_weights(const Lstm& l, const float* dgates, Steps<const float> x, bool before, float* into, i64 clients,
                            const i64* ends, const i64* places, i64 into_stride, i64 beta) {
  Scratch<Factor> scratch;
  for (i64 c = 0, row = 0; c < clients; row = ends[c++]) {
    const Steps<const float> seen{x(row, 0), x.row, x.time};
    outer_product(Pairs<Steps<const float>>{l, dgates + row * l.time * l.four(), ends[c] - row, seen, before}, l.four(),
                  l.features, into + places[c] * into_stride, beta, scratch);
  }
}

// into[place of client][4 hidden][features] = β into + the gradient of weights that saw x, or with `before` h one step earlier
extern "C" void lstm_weights(const float* dgates, const float* x, float* into, i64 clients, const i64* ends, const i64* places,
                             i64 into_stride, i64 beta, i64 time, i64 features, i64 hidden, i64 backwards, i64 before,
                             i64 x_row, i64 x_time, i64 low) {
  const auto weights = low ? clients_weights<Two> : clients_weights<float>;
  weights({time, features, hidden, backwards != 0}, dgates, {x, x_row, x_time}, before != 0, into, clients, ends, places,
          into_stride, beta);
}
