// What functions that train whole trips are told of them.

#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "vectors.h"

struct Sgd {
  float lr, momentum, weight_decay, proximal;
  i64 batch_size, epochs, steps, lr_norm;  // steps < 0: as many as the epochs take

  i64 per_epoch(i64 examples) const { return (examples + batch_size - 1) / batch_size; }
  i64 steps_of(i64 examples) const { return steps < 0 ? epochs * per_epoch(examples) : steps; }
  // η_l of a step on so many examples
  float rate(i64 examples) const {
    return lr_norm ? static_cast<float>(double(lr) * double(examples) / double(batch_size)) : lr;
  }
};

template <class Input> struct Client {
  const Input* x;
  const i64* y;
  i64 examples;
};

static inline std::uint64_t mix(std::uint64_t z) {  // shuffle.py's _mix
  z += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// shuffle.py's hash of a trip; `purpose` is where hashes of one purpose begin
static inline std::uint64_t hashed(std::uint64_t purpose, i64 client, i64 trip) {
  return mix(mix(purpose + static_cast<std::uint64_t>(client)) + static_cast<std::uint64_t>(trip));
}

using Keys = std::vector<std::pair<std::uint64_t, i64>>;

// the order in which an epoch sees its examples
static inline void shuffle(std::uint64_t of_epoch, std::vector<i64>& order, Keys& keys) {
  keys.resize(order.size());
  for (std::size_t i = 0; i < keys.size(); i++) keys[i] = {mix(of_epoch + i * 0x9E3779B97F4A7C15u), static_cast<i64>(i)};
  std::sort(keys.begin(), keys.end());
  for (std::size_t i = 0; i < keys.size(); i++) order[i] = keys[i].second;
}
