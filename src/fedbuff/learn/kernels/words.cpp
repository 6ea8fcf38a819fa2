// Whole trips of one local step of the paper's network for text: frozen word vectors, LSTM layers with dropout between
// them, and after the last word a linear layer, ReLU, dropout, and a linear layer; cross entropy.
//
// Trips that start from the same weights go through it together, some rows at a time, there and back, so that what they
// leave on the way is still in a cache when they come back.

#include <memory>

#include "cross_entropy.h"
#include "lstm.h"
#include "trips.h"
#include "twister.h"

constexpr i64 ROWS = 24;  // at a time, but a client's all

struct Words {
  i64 words, features, time, hidden, layers, width, classes;
  const float* vectors;  // [word][features]
  double keep;           // of dropout: the share of numbers that stay
};

// where the weights of a layer begin: its weights for inputs and states, and biases
struct At {
  i64 in, state, bias_in, bias_state;
};

// Numbers that nobody has set yet; room for more is made, never less.
struct Room {
  std::unique_ptr<float[]> numbers;
  i64 size = 0;
  float* of(i64 count) {
    if (count > size) numbers.reset(new float[size = count]);
    return numbers.get();
  }
};

// The network with the weights of one version, as products want them.
struct Network {
  const Words& net;
  std::vector<Lstm> layer;
  std::vector<At> at;
  i64 hidden_at, output_at, size;  // the linear layers' weights, each followed by its bias
  std::vector<std::vector<float>> in, state, state_back, in_back, bias;
  std::vector<float> first, first_back, output, output_back;
  const float* w = nullptr;

  explicit Network(const Words& net) : net(net), in(net.layers), state(net.layers), state_back(net.layers), in_back(net.layers), bias(net.layers) {
    i64 from = 0;
    for (i64 l = 0; l < net.layers; l++) {
      const i64 features = l ? net.hidden : net.features, four = 4 * net.hidden;
      layer.push_back({net.time, features, net.hidden, false});
      const i64 of_state = from + four * features, biases = of_state + four * net.hidden;
      at.push_back({from, of_state, biases, biases + four});
      from = biases + 2 * four;
    }
    hidden_at = from;
    output_at = hidden_at + net.width * (net.hidden + 1);
    size = output_at + net.classes * (net.width + 1);
  }

  void take(const float* weights) {
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
    pack_turned(first, w + hidden_at, net.hidden, net.width), pack(first_back, w + hidden_at, net.width, net.hidden);
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

// y = x w + bias for rows that lie so far apart; bias in the end of w's block of the flat vector, or null
static void linear(const float* x, i64 rows, i64 stride, i64 in, const std::vector<float>& w, const float* bias, i64 out, float* y) {
  std::vector<const float*> from(rows);
  for (i64 r = 0; r < rows; r++) from[r] = x + r * stride;
  const i64 wide = filled(out);
  std::vector<float> start(wide);
  if (bias) std::copy(bias, bias + out, start.begin());
  multiply(from.data(), rows, in, w.data(), 0, true, start.data(), 0, y, wide, wide);
}

// to[columns] = Σ rows
static void add_up(const float* rows, i64 count, i64 stride, i64 columns, float* to) {
  std::fill(to, to + columns, 0.0f);
  for (i64 r = 0; r < count; r++)
    for (i64 i = 0; i < columns; i++) to[i] += rows[r * stride + i];
}

static void times(float* x, const float* y, i64 count) {
  for (i64 i = 0; i < count; i++) x[i] *= y[i];
}

// Scratch for some rows, used again for the next.
struct Scratch {
  std::vector<Room> gates, h, c, squashed, mask, input;
  Room dx, dc, up, first, first_mask, output, dfirst;
  explicit Scratch(i64 layers) : gates(layers), h(layers), c(layers), squashed(layers), mask(layers), input(layers) {}
};

// The updates of some trips that start from the weights that `n` has taken.
static void train(const Network& n, std::vector<Trip>& trips, Scratch& s, std::vector<Twister>& twisters, std::vector<float>& sums) {
  const Words& net = n.net;
  const i64 time = net.time, hidden = net.hidden, four = 4 * hidden, last = net.layers - 1;
  const i64 width = filled(net.width), classes = filled(net.classes);
  const bool drops = net.keep < 1;
  i64 rows = 0;
  for (const Trip& trip : trips) rows += trip.rows();
  if (drops) {
    twisters.resize(trips.size());
    for (std::size_t i = 0; i < trips.size(); i++) seed(twisters[i], trips[i].seed);
  }

  float* x = s.input[0].of(rows * time * net.features);
  i64 row = 0;
  for (const Trip& trip : trips)
    for (const i64 example : trip.order)
      for (i64 t = 0; t < time; t++, row++)
        std::copy_n(net.vectors + trip.x[example * time + t] * net.features, net.features, x + row * net.features);
  for (i64 l = 0; l <= last; l++) {
    const i64 features = n.layer[l].features;
    float* h = s.h[l].of(rows * time * hidden);
    lstm_rows(n.layer[l], rows, Steps<const float>{x, time * features, features}, n.in[l].data(), n.state[l].data(),
              n.bias[l].data(), s.gates[l].of(rows * time * four), Steps<float>{h, time * hidden, hidden},
              s.c[l].of(rows * time * hidden), s.squashed[l].of(rows * time * hidden));
    if (l == last) break;
    if (!drops) {
      x = h;
      continue;
    }
    float* mask = s.mask[l].of(rows * time * hidden);
    x = s.input[l + 1].of(rows * time * hidden);
    row = 0;
    for (std::size_t i = 0; i < trips.size(); row += trips[i++].rows())
      draw_steps(twisters[i], mask + row * time * hidden, trips[i].rows(), time, hidden, net.keep);
    for (i64 i = 0; i < rows * time * hidden; i++) x[i] = h[i] * mask[i];
  }

  const float* end = s.h[last].of(0) + (time - 1) * hidden;
  float* first = s.first.of(rows * width);
  linear(end, rows, time * hidden, hidden, n.first, n.w + n.hidden_at + net.width * hidden, net.width, first);
  for (i64 i = 0; i < rows * width; i++) first[i] = first[i] <= 0 ? 0 : first[i];
  float* mask = s.first_mask.of(rows * width);
  std::fill(mask, mask + rows * width, 1.0f);
  row = 0;
  for (std::size_t i = 0; drops && i < trips.size(); i++)
    for (i64 r = 0; r < trips[i].rows(); r++, row++) draw(twisters[i], mask + row * width, net.width, net.keep);
  float* dropped = s.dfirst.of(rows * width);
  for (i64 i = 0; i < rows * width; i++) dropped[i] = first[i] * mask[i];
  float* d = s.output.of(rows * classes);
  linear(dropped, rows, width, net.width, n.output, n.w + n.output_at + net.classes * net.width, net.classes, d);
  row = 0;
  for (const Trip& trip : trips)
    for (const i64 example : trip.order) {
      float* of_row = d + row++ * classes;
      softmax_less_label(of_row, net.classes, trip.y[example]);
      for (i64 i = 0; i < classes; i++) of_row[i] *= trip.scale;
    }

  std::vector<float> none;
  // into each trip's update, at `at`: dyᵀ x over its rows, and behind it Σ dy
  const auto of_linear = [&](const float* dy, i64 out, i64 dy_stride, const float* x, i64 in, i64 x_stride, i64 at) {
    i64 row = 0;
    for (const Trip& trip : trips) {
      const float* from = dy + row * dy_stride;
      outer_product(Apart{from, x + row * x_stride, trip.rows(), dy_stride, x_stride}, out, in, trip.update + at, 0, none);
      add_up(from, trip.rows(), dy_stride, out, trip.update + at + out * in);
      row += trip.rows();
    }
  };
  of_linear(d, net.classes, classes, dropped, net.width, width, n.output_at);
  linear(d, rows, classes, net.classes, n.output_back, nullptr, net.width, dropped);
  for (i64 i = 0; i < rows * width; i++) dropped[i] = first[i] <= 0 ? 0 : dropped[i] * mask[i];
  of_linear(dropped, net.width, width, end, hidden, time * hidden, n.hidden_at);
  const i64 wide = filled(hidden);
  float* up = s.up.of(rows * wide);
  linear(dropped, rows, width, net.width, n.first_back, nullptr, hidden, up);

  const std::vector<float> zeros(hidden);
  std::vector<const float*> from(rows * time);
  for (i64 l = last; l >= 0; l--) {
    float* gates = s.gates[l].of(0);
    float* dc = s.dc.of(rows * hidden);
    std::fill(dc, dc + rows * hidden, 0.0f);
    const float* dx = s.dx.of(l == last ? 0 : rows * time * wide);
    const auto dh = [&](i64 r, i64 t) {
      return l < last ? dx + (r * time + t) * wide : t == time - 1 ? up + r * wide : zeros.data();
    };
    lstm_rows_back(n.layer[l], rows, gates, n.state_back[l].data(), s.c[l].of(0), s.squashed[l].of(0), dh, dc);
    const i64 features = n.layer[l].features;
    const float* x = l == 0 || drops ? s.input[l].of(0) : s.h[l - 1].of(0);
    i64 row = 0;
    for (const Trip& trip : trips) {
      const float* dgates = gates + row * time * four;
      const Steps<const float> inputs{x + row * time * features, time * features, features};
      const Steps<const float> states{s.h[l].of(0) + row * time * hidden, time * hidden, hidden};
      outer_product(Pairs<Steps<const float>>{n.layer[l], dgates, trip.rows(), inputs, false}, four, features,
                    trip.update + n.at[l].in, 0, none);
      outer_product(Pairs<Steps<const float>>{n.layer[l], dgates, trip.rows(), states, true}, four, hidden,
                    trip.update + n.at[l].state, 0, none);
      sums.resize(four);
      add_up(dgates, trip.rows() * time, four, four, sums.data());
      std::copy(sums.begin(), sums.end(), trip.update + n.at[l].bias_in);
      std::copy(sums.begin(), sums.end(), trip.update + n.at[l].bias_state);
      row += trip.rows();
    }
    if (l == 0) break;
    float* below = s.dx.of(rows * time * wide);
    for (i64 i = 0; i < rows * time; i++) from[i] = gates + i * four;
    multiply(from.data(), rows * time, four, n.in_back[l].data(), 0, true, nullptr, 0, below, wide, wide);
    if (drops)
      for (i64 i = 0; i < rows * time; i++) times(below + i * wide, s.mask[l - 1].of(0) + i * hidden, hidden);
  }
}

// As train_trips, for trips sorted by where they start; those of more than one local step are not for it.
// Returns the number of the first trip that can't be trained here, by its steps, words or labels, or -1.
extern "C" i64 train_words(i64 trips, const Client<i64>* table, const i64* where, const i64* clients, const i64* numbers,
                           const float* const* starts, const i64* into, float* updates, i64 stride, std::uint64_t hash,
                           std::uint64_t dropout_hash, const Words* words, const Sgd* how) {
  const Sgd sgd = *how;
  Network network(*words);
  Scratch scratch(words->layers);
  std::vector<Twister> twisters;
  std::vector<Trip> part;
  std::vector<float> sums;
  Keys keys;
  for (i64 i = 0; i < trips; i++) {
    const auto [x, y, n] = table[where[i]];
    const i64 steps = sgd.steps < 0 ? sgd.epochs * ((n + sgd.batch_size - 1) / sgd.batch_size) : sgd.steps;
    if (steps != 1) return i;
    for (i64 k = 0; k < n; k++)
      if (y[k] < 0 || y[k] >= words->classes) return i;
    for (i64 k = 0; k < n * words->time; k++)
      if (x[k] < 0 || x[k] >= words->words) return i;
  }
  for (i64 i = 0, rows = 0; i < trips; i++) {
    const auto [x, y, n] = table[where[i]];
    Trip trip{x, y, std::vector<i64>(n), 0, updates + into[i] * stride, 0};
    shuffle(mix(hashed(hash, clients[i], numbers[i])), trip.order, keys);
    trip.order.resize(std::min(n, sgd.batch_size));
    trip.scale = sgd.rate(trip.rows()) / static_cast<float>(trip.rows());
    trip.seed = static_cast<std::uint32_t>(hashed(dropout_hash, clients[i], numbers[i]) >> 1);
    rows += trip.rows();
    part.push_back(std::move(trip));
    if (i + 1 == trips || starts[i + 1] != starts[i] || rows >= ROWS) {
      network.take(starts[i]);
      train(network, part, scratch, twisters, sums);
      part.clear();
      rows = 0;
    }
  }
  return -1;
}
