// Whole trips of a small network.
//
// Linear layers with ReLU between them, and cross entropy: logistic regression and small perceptrons, whose steps are
// so short that calling anything costs more than computing. Weights are kept transposed, [in][out], out filled up to 8.

#include <algorithm>
#include <vector>

#include "cross_entropy.h"
#include "products.h"
#include "trips.h"

namespace {  // of this file: others have names like these

struct Network {
  i64 layers;
  const i64* sizes;  // layers + 1 of them
  const i64* bias;   // whether each layer has one
  std::vector<i64> at;
  i64 size = 0, widest = 0, flat = 0;

  Network(i64 layers, const i64* sizes, const i64* bias) : layers(layers), sizes(sizes), bias(bias) {
    for (i64 l = 0; l < layers; l++) {
      at.push_back(size);
      size += (sizes[l] + 1) * filled(sizes[l + 1]);  // the last row is the bias
      flat += sizes[l] * sizes[l + 1] + (bias[l] ? sizes[l + 1] : 0);
      widest = std::max(widest, filled(sizes[l + 1]));
    }
  }
  template <class F> void each(F f) const {  // f(index in the flat vector, index in the transposed weights)
    i64 from = 0;
    for (i64 l = 0; l < layers; l++) {
      const i64 width = filled(sizes[l + 1]);
      for (i64 o = 0; o < sizes[l + 1]; o++)
        for (i64 i = 0; i < sizes[l]; i++) f(from++, at[l] + i * width + o);
      if (bias[l])
        for (i64 o = 0; o < sizes[l + 1]; o++) f(from++, at[l] + sizes[l] * width + o);
    }
  }
};

}  // namespace

// The examples of trip i are those of table[where[i]], its update goes into row into[i].
// Returns the number of the first trip with a label that is no class, or -1.
extern "C" i64 train_trips(i64 trips, const Client<float>* table, const i64* where, const i64* clients, const i64* numbers,
                           const float* const* starts, const i64* into, float* updates, i64 stride, std::uint64_t hash,
                           i64 layers, const i64* sizes, const i64* bias, const Sgd* how) {
  const Network net(layers, sizes, bias);
  const Sgd sgd = *how;
  const i64 classes = sizes[layers], features = sizes[0];
  std::vector<float> start(net.size), w(net.size), g(net.size), velocity(net.size);
  std::vector<float> turned;                                     // a layer's weights [out][in], for the gradient of its input
  std::vector<std::vector<float>> hidden(layers + 1), dz(2);     // outputs of each layer
  std::vector<std::vector<const float*>> rows(layers + 1);       // pointers to the rows of each layer's input
  Keys keys;
  std::vector<i64> order;
  const float* loaded = nullptr;
  for (i64 trip = 0; trip < trips; trip++) {
    const auto [x, y, n] = table[where[trip]];
    for (i64 i = 0; i < n; i++)
      if (y[i] < 0 || y[i] >= classes) return trip;
    const std::uint64_t of_trip = hashed(hash, clients[trip], numbers[trip]);
    if (loaded != starts[trip]) {
      loaded = starts[trip];
      net.each([&](i64 from, i64 to) { start[to] = loaded[from]; });
    }
    w = start;
    if (sgd.momentum != 0) std::fill(velocity.begin(), velocity.end(), 0.0f);
    order.resize(n);
    // the next trip's examples come from afar, and the memory answers to few at once: some lines are asked for with each row
    const auto next = table[where[std::min(trip + 1, trips - 1)]];
    const float *coming = next.x, *end = next.x + next.examples * features;
    for (i64 i = 0; i < next.examples; i += 8) __builtin_prefetch(next.y + i, 0, 2);
    const i64 per_epoch = sgd.per_epoch(n), steps = sgd.steps_of(n);
    for (i64 step = 0; step < steps; step++) {
      const i64 first = step % per_epoch * sgd.batch_size, count = std::min(sgd.batch_size, n - first);
      if (first == 0) {
        const std::uint64_t of_epoch = mix(of_trip + static_cast<std::uint64_t>(step / per_epoch));
        if (per_epoch == 1) {  // one batch of everything: its order does not matter
          for (i64 i = 0; i < n; i++) order[i] = i;
        } else {
          shuffle(of_epoch, order, keys);
        }
      }
      for (auto& r : rows) r.resize(count);
      for (i64 i = 0; i < count; i++) rows[0][i] = x + order[first + i] * features;
      for (i64 l = 0; l < layers; l++) {
        const i64 in = sizes[l], width = filled(sizes[l + 1]);
        std::vector<float>& z = hidden[l];
        z.resize(count * width);
        multiply(rows[l].data(), count, in, &w[net.at[l]], width, {&w[net.at[l] + in * width], 0}, {z.data(), width}, width);
        for (i64 i = 0; i < count; i++) rows[l + 1][i] = &z[i * width];
        if (l + 1 < layers)
          for (i64 i = 0; i < count * width; i += 8) {
            const v8 v = load(&z[i]);
            store(&z[i], v <= 0 ? all(0) : v);
          }
      }
      // softmax, and the gradient of the mean cross entropy in its place
      const i64 wide = filled(classes);
      std::vector<float>& p = hidden[layers - 1];
      for (i64 i = 0; i < count; i++) {
        float* row = &p[i * wide];
        for (int line = 0; line < 8 && coming < end; line++, coming += 16) __builtin_prefetch(coming, 0, 2);
        softmax_less_label(row, classes, y[order[first + i]]);
        for (i64 c = 0; c < wide; c += 8) store(row + c, load(row + c) / static_cast<float>(count));
      }
      const float* d = p.data();
      for (i64 l = layers - 1; l >= 0; l--) {
        const i64 in = sizes[l], width = filled(sizes[l + 1]);
        float* to = &g[net.at[l]];
        const auto pairs = [&](auto f) __attribute__((always_inline)) {
          for (i64 i = 0; i < count; i++) f(rows[l][i], d + i * width);
        };
        transposed_times(pairs, in, to, width, width);
        float* b = to + in * width;
        for (i64 o = 0; o < width; o += 8) {
          v8 sum = all(0);
          for (i64 i = 0; bias[l] && i < count; i++) sum += load(d + i * width + o);
          store(b + o, sum);
        }
        if (l > 0) {
          const i64 out = sizes[l + 1], wide_in = filled(in);
          turned.assign(out * wide_in, 0.0f);
          for (i64 i = 0; i < in; i++)
            for (i64 o = 0; o < out; o++) turned[o * wide_in + i] = w[net.at[l] + i * width + o];
          std::vector<float>& next = dz[l % 2];
          next.resize(count * wide_in);
          std::vector<const float*>& ds = rows[layers];  // no longer needed
          for (i64 i = 0; i < count; i++) ds[i] = d + i * width;
          multiply(ds.data(), count, out, turned.data(), wide_in, {nullptr, 0}, {next.data(), wide_in}, wide_in);
          const float* h = hidden[l - 1].data();
          for (i64 i = 0; i < count * wide_in; i += 8) store(&next[i], load(h + i) <= 0 ? all(0) : load(&next[i]));
          d = next.data();
        }
      }
      const float lr = sgd.rate(count);
      for (i64 i = 0; i < net.size; i += 8) {
        v8 direction = load(&g[i]);
        const v8 now = load(&w[i]);
        if (sgd.weight_decay != 0) direction += now * sgd.weight_decay;
        if (sgd.proximal != 0) direction += (now - load(&start[i])) * sgd.proximal;
        if (sgd.momentum != 0) {
          direction += load(&velocity[i]) * sgd.momentum;
          store(&velocity[i], direction);
        }
        store(&w[i], now - direction * lr);
      }
    }
    float* update = updates + into[trip] * stride;
    net.each([&](i64 to, i64 from) { update[to] = start[from] - w[from]; });
  }
  return -1;
}
