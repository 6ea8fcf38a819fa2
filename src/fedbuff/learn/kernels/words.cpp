// Whole trips of one local step of the paper's network for text: frozen word vectors, LSTM layers with dropout between
// them, and after the last word a linear layer, ReLU, dropout, and a linear layer; cross entropy.
//
// Trips that start from the same weights go through it together, some rows at a time, there and back, so that what they
// leave on the way is still in a cache when they come back.

#include "cross_entropy.h"
#include "texts.h"
#include "trips.h"
#include "twister.h"

namespace {  // of this file: others have names like these

constexpr i64 AT_A_TIME = 48;  // rows, but a client's all

struct Words {
  i64 words, features, time, hidden, layers, width, classes;
  const float* vectors;  // [word][features]
  double keep;           // of dropout: the share of numbers that stay
};

// where the weights of a layer begin: its weights for inputs and states, and biases
struct At {
  i64 in, state, bias_in, bias_state;
};

// The network with the weights of one version, as products want them.
template <class Factor> struct Network {
  const Words& net;
  std::vector<Lstm> layer;
  std::vector<At> at;
  i64 first_at, output_at;  // the linear layers' weights, each followed by its bias
  std::vector<std::vector<Factor>> in, state, state_back, in_back;
  std::vector<Factor> first, first_back, output, output_back;
  std::vector<std::vector<float>> bias;
  const float* w = nullptr;

  explicit Network(const Words& net)
      : net(net), in(net.layers), state(net.layers), state_back(net.layers), in_back(net.layers), bias(net.layers) {
    i64 from = 0;
    for (i64 l = 0; l < net.layers; l++) {
      const i64 features = l ? net.hidden : net.features, four = 4 * net.hidden;
      layer.push_back({net.time, features, net.hidden, false});
      const i64 of_state = from + four * features, biases = of_state + four * net.hidden;
      at.push_back({from, of_state, biases, biases + four});
      from = biases + 2 * four;
    }
    first_at = from;
    output_at = first_at + net.width * (net.hidden + 1);
  }

  void load(const float* weights) {
    if (w == weights) return;
    w = weights;
    for (i64 l = 0; l < net.layers; l++) {
      pack_turned(in[l], w + at[l].in, layer[l].features, 4 * net.hidden);
      pack_turned(state[l], w + at[l].state, net.hidden, 4 * net.hidden);
      pack(state_back[l], w + at[l].state, 4 * net.hidden, net.hidden);
      if (l) pack(in_back[l], w + at[l].in, 4 * net.hidden, net.hidden);
      bias[l].resize(4 * net.hidden);
      for (i64 i = 0; i < 4 * net.hidden; i++) bias[l][i] = w[at[l].bias_in + i] + w[at[l].bias_state + i];
    }
    pack_turned(first, w + first_at, net.hidden, net.width), pack(first_back, w + first_at, net.width, net.hidden);
    pack_turned(output, w + output_at, net.width, net.classes), pack(output_back, w + output_at, net.classes, net.width);
  }
};

struct Trip {
  const i64 *x, *y;
  std::vector<i64> order;  // of the examples in its step
  float scale;             // η_l / how many: the gradient of the mean loss times the learning rate is its update
  float* update;
  std::uint32_t seed;

  i64 rows() const { return static_cast<i64>(order.size()); }
};

// y = x w + bias for rows of x that lie so far apart; bias may be null. Rows of y are filled up to a multiple of 8.
template <class Factor>
void linear(const float* x, i64 rows, i64 stride, i64 in, const std::vector<Factor>& w, const float* bias, i64 out,
            float* y) {
  std::vector<const float*> from(rows);
  for (i64 r = 0; r < rows; r++) from[r] = x + r * stride;
  const i64 wide = filled(out);
  std::vector<float> start(wide);
  if (bias) std::copy(bias, bias + out, start.begin());
  multiply(from.data(), rows, in, w.data(), {start.data(), 0}, {y, wide}, wide);
}

// pairs of rows, wherever they lie
struct Listed {
  const PairsOfRows& pairs;
  template <class F> ALWAYS_MEMBER void operator()(F f) const {
    for (const auto& [a, b] : pairs) f(a, b);
  }
};

// to[columns] = Σ rows
void add_up(const float* rows, i64 count, i64 stride, i64 columns, float* to) {
  std::fill(to, to + columns, 0.0f);
  for (i64 r = 0; r < count; r++)
    for (i64 i = 0; i < columns; i++) to[i] += rows[r * stride + i];
}

// Some trips of one version on their way through the network and back. Memory is used again for the next ones.
template <class Factor> struct Pass {
  const Network<Factor>& n;
  const Words& net;
  const i64 hidden, four, width, classes, last;  // width and classes filled up, as linear layers leave them
  const bool drops;
  std::vector<Trip> trips;
  i64 rows = 0;
  std::vector<Twister> twisters;  // one for each trip
  Texts texts;
  std::vector<Room<float>> inputs, gates, h, c, tanh_c, mask;  // of each LSTM layer
  Room<float> first, first_mask, dropped, output, up, dx, dc;
  Scratch<Factor> scratch;

  explicit Pass(const Network<Factor>& n)
      : n(n), net(n.net), hidden(net.hidden), four(4 * hidden), width(filled(net.width)), classes(filled(net.classes)),
        last(net.layers - 1), drops(net.keep < 1), texts(net.words, net.time, net.features, net.vectors), inputs(net.layers),
        gates(net.layers), h(net.layers), c(net.layers), tanh_c(net.layers), mask(net.layers) {}

  void take(Trip trip) {
    rows += trip.rows();
    for (const i64 example : trip.order) texts.rows.push_back(trip.x + example * net.time);
    trips.push_back(std::move(trip));
  }

  void train() {
    twisters.resize(trips.size());
    for (std::size_t i = 0; drops && i < trips.size(); i++) seed(twisters[i], trips[i].seed);
    texts.read(four);
    for (i64 l = 0; l <= last; l++) through_layer(l);
    through_head();
    back_through_head();
    for (i64 l = last; l >= 0; l--) back_through_layer(l);
    trips.clear(), texts.rows.clear();
    rows = 0;
  }

  // f(trip, its number, its first row)
  template <class F> void each(F f) {
    i64 row = 0;
    for (std::size_t i = 0; i < trips.size(); row += trips[i++].rows()) f(trips[i], i, row);
  }

  void through_layer(i64 l) {
    const i64 steps = rows * net.time;
    const Steps<float> states{h[l].make(steps * hidden), net.time * hidden, hidden};
    float *gate = gates[l].make(steps * four), *state = c[l].make(steps * hidden), *squashed = tanh_c[l].make(steps * hidden);
    if (l == 0) {
      const auto words = [&](auto... at) { texts.begin(at..., n.in[0].data(), n.bias[0].data(), four); };
      lstm_rows(n.layer[0], rows, words, n.state[0].data(), gate, states, state, squashed, &texts.alike);
    } else {
      const Inputs<Steps<const float>, Factor> seen{n.layer[l], {input_of(l), net.time * hidden, hidden}, n.in[l].data(),
                                            n.bias[l].data(), {}};
      lstm_rows(n.layer[l], rows, seen, n.state[l].data(), gate, states, state, squashed);
    }
    if (l < last && drops) drop_out(l);
  }

  // what the next layer sees
  void drop_out(i64 l) {
    const i64 numbers = rows * net.time * hidden;
    float* m = mask[l].make(numbers);
    float* y = inputs[l + 1].make(numbers);
    each([&](const Trip& trip, std::size_t i, i64 row) {
      draw_steps(twisters[i], m + row * net.time * hidden, trip.rows(), net.time, hidden, net.keep);
    });
    const float* states = h[l].get();
    for (i64 i = 0; i < numbers; i++) y[i] = states[i] * m[i];
  }

  // of a layer after the first
  const float* input_of(i64 l) { return drops ? inputs[l].get() : h[l - 1].get(); }
  const float* after_last_word() { return h[last].get() + (net.time - 1) * hidden; }

  // to the gradient of the loss by the outputs
  void through_head() {
    float* z = first.make(rows * width);
    linear(after_last_word(), rows, net.time * hidden, hidden, n.first, n.w + n.first_at + net.width * hidden, net.width, z);
    for (i64 i = 0; i < rows * width; i++) z[i] = z[i] <= 0 ? 0 : z[i];
    float* m = first_mask.make(rows * width);
    std::fill(m, m + rows * width, 1.0f);
    if (drops)
      each([&](const Trip& trip, std::size_t i, i64 row) {
        for (i64 r = row; r < row + trip.rows(); r++) draw(twisters[i], m + r * width, net.width, net.keep);
      });
    float* y = dropped.make(rows * width);
    for (i64 i = 0; i < rows * width; i++) y[i] = z[i] * m[i];
    float* d = output.make(rows * classes);
    linear(y, rows, width, net.width, n.output, n.w + n.output_at + net.classes * net.width, net.classes, d);
    for (const Trip& trip : trips)
      for (const i64 example : trip.order) {
        softmax_less_label(d, net.classes, trip.y[example]);
        for (i64 i = 0; i < classes; i++, d++) *d *= trip.scale;
      }
  }

  void back_through_head() {
    const float *d = output.get(), *z = first.get(), *m = first_mask.get();
    float* dz = dropped.get();  // what the output layer saw; its gradient takes its place as soon as it was used
    of_linear(d, net.classes, classes, dz, net.width, width, n.output_at);
    linear(d, rows, classes, net.classes, n.output_back, nullptr, net.width, dz);
    for (i64 i = 0; i < rows * width; i++) dz[i] = z[i] <= 0 ? 0 : dz[i] * m[i];
    of_linear(dz, net.width, width, after_last_word(), hidden, net.time * hidden, n.first_at);
    linear(dz, rows, width, net.width, n.first_back, nullptr, hidden, up.make(rows * filled(hidden)));
  }

  // into each trip's update, at `at`: dyᵀ x over its rows, and behind it Σ dy
  void of_linear(const float* dy, i64 out, i64 dy_stride, const float* x, i64 in, i64 x_stride, i64 at) {
    each([&](const Trip& trip, std::size_t, i64 row) {
      const Apart<float> pairs{dy + row * dy_stride, x + row * x_stride, trip.rows(), dy_stride, x_stride};
      outer_product(pairs, out, in, trip.update + at, 0, scratch);
      add_up(pairs.a, trip.rows(), dy_stride, out, trip.update + at + out * in);
    });
  }

  void back_through_layer(i64 l) {
    const i64 time = net.time, wide = filled(hidden);
    float* d = gates[l].get();
    const float* from_above = dx.get();  // the gradient of what the layer above saw,
    const float* from_head = up.get();   // or of what the head saw
    float* of_state = dc.make(rows * hidden);
    std::fill(of_state, of_state + rows * hidden, 0.0f);
    const std::vector<float> zeros(hidden);
    const auto dh = [&](i64 r, i64 t) {
      return l < last ? from_above + (r * time + t) * wide : t == time - 1 ? from_head + r * wide : zeros.data();
    };
    lstm_rows_back(n.layer[l], rows, d, n.state_back[l].data(), c[l].get(), tanh_c[l].get(), dh, of_state);
    each([&](const Trip& trip, std::size_t, i64 row) {
      const float* from = d + row * time * four;
      const Steps<const float> states{h[l].get() + row * time * hidden, time * hidden, hidden};
      float* to = trip.update;
      if (l == 0) {
        outer_product(Listed{texts.with_gradients(row, trip.rows(), from, four)}, four, net.features, to + n.at[l].in, 0, scratch);
      } else {
        const Steps<const float> seen{input_of(l) + row * time * hidden, time * hidden, hidden};
        outer_product(Pairs<Steps<const float>>{n.layer[l], from, trip.rows(), seen, false}, four, hidden, to + n.at[l].in, 0,
                      scratch);
      }
      outer_product(Pairs<Steps<const float>>{n.layer[l], from, trip.rows(), states, true}, four, hidden,
                    to + n.at[l].state, 0, scratch);
      add_up(from, trip.rows() * time, four, four, to + n.at[l].bias_in);
      std::copy_n(to + n.at[l].bias_in, four, to + n.at[l].bias_state);
    });
    if (l == 0) return;
    std::vector<const float*> from(rows * time);
    for (i64 i = 0; i < rows * time; i++) from[i] = d + i * four;
    float* to = dx.make(rows * time * wide);
    multiply(from.data(), rows * time, four, n.in_back[l].data(), {nullptr, 0}, {to, wide}, wide);
    const float* m = mask[l - 1].get();
    for (i64 i = 0; drops && i < rows * time; i++)
      for (i64 k = 0; k < hidden; k++) to[i * wide + k] *= m[i * hidden + k];
  }
};

// The trips, sorted by where they start, one version after another.
template <class Factor>
void train(i64 trips, const Client<i64>* table, const i64* where, const i64* clients, const i64* numbers,
           const float* const* starts, const i64* into, float* updates, i64 stride, std::uint64_t hash,
           std::uint64_t dropout_hash, const Words& words, const Sgd& sgd) {
  Network<Factor> network(words);
  Pass<Factor> pass(network);
  Keys keys;
  for (i64 i = 0; i < trips; i++) {
    const auto [x, y, n] = table[where[i]];
    Trip trip{x, y, std::vector<i64>(n), 0, updates + into[i] * stride, 0};
    shuffle(mix(hashed(hash, clients[i], numbers[i])), trip.order, keys);
    trip.order.resize(std::min(n, sgd.batch_size));
    trip.scale = sgd.rate(trip.rows()) / static_cast<float>(trip.rows());
    trip.seed = static_cast<std::uint32_t>(hashed(dropout_hash, clients[i], numbers[i]) >> 1);
    pass.take(std::move(trip));
    if (i + 1 == trips || starts[i + 1] != starts[i] || pass.rows >= AT_A_TIME) {
      network.load(starts[i]);
      pass.train();
    }
  }
}

}  // namespace

// As train_trips, for trips sorted by where they start; those of more than one local step are not for it. With `low`,
// products are of bfloat16.
// Returns the number of the first trip that can't be trained here, by its steps, words or labels, or -1.
extern "C" i64 train_words(i64 trips, const Client<i64>* table, const i64* where, const i64* clients, const i64* numbers,
                           const float* const* starts, const i64* into, float* updates, i64 stride, std::uint64_t hash,
                           std::uint64_t dropout_hash, const Words* words, const Sgd* sgd, i64 low) {
  for (i64 i = 0; i < trips; i++) {
    const auto [x, y, n] = table[where[i]];
    if (sgd->steps_of(n) != 1) return i;
    for (i64 k = 0; k < n; k++)
      if (y[k] < 0 || y[k] >= words->classes) return i;
    for (i64 k = 0; k < n * words->time; k++)
      if (x[k] < 0 || x[k] >= words->words) return i;
  }
  const auto with = [&](auto train) {
    train(trips, table, where, clients, numbers, starts, into, updates, stride, hash, dropout_hash, *words, *sgd);
  };
  low ? with(train<Two>) : with(train<float>);
  return -1;
}
