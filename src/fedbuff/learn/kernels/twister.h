// torch's CPU generator, MT19937, and the masks it would draw: two numbers for each element, 53 bits of them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

using i64 = std::int64_t;

struct Twister {
  std::uint32_t state[624], numbers[624];  // numbers: what the state gives
  i64 next;
};

static void refill(Twister& t) {
  std::uint32_t* s = t.state;
  auto twist = [](std::uint32_t u, std::uint32_t v) {
    const std::uint32_t y = (u & 0x80000000u) | (v & 0x7fffffffu);
    return (y >> 1) ^ ((v & 1u) ? 0x9908b0dfu : 0u);
  };
  for (int i = 0; i < 227; i++) s[i] = s[i + 397] ^ twist(s[i], s[i + 1]);
  for (int i = 227; i < 623; i++) s[i] = s[i - 227] ^ twist(s[i], s[i + 1]);
  s[623] = s[396] ^ twist(s[623], s[0]);
  for (int i = 0; i < 624; i++) {
    std::uint32_t y = s[i];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    t.numbers[i] = y ^ (y >> 18);
  }
  t.next = 0;
}

static void seed(Twister& t, std::uint32_t with) {
  t.state[0] = with;
  for (std::uint32_t k = 1; k < 624; k++) t.state[k] = 1812433253u * (t.state[k - 1] ^ (t.state[k - 1] >> 30)) + k;
  t.next = 624;
}

// mask ← 1/keep or 0
static void draw(Twister& t, float* mask, i64 count, double keep) {
  const float on = static_cast<float>(1 / keep);
  const i64 below = static_cast<i64>(std::ceil(keep * 0x1p53));  // of 2^53: bits · 2^−53 < keep, in whole numbers
  while (count > 0) {
    if (t.next == 624) refill(t);  // 624 is even: a pair never straddles
    const std::uint32_t* from = t.numbers + t.next;
    const i64 some = std::min<i64>(count, (624 - t.next) / 2);
    for (i64 i = 0; i < some; i++) {
      const i64 bits = static_cast<i64>(from[2 * i] & 0x1fffffu) << 32 | from[2 * i + 1];
      mask[i] = bits < below ? on : 0.0f;
    }
    t.next += 2 * some, mask += some, count -= some;
  }
}

// the same for some rows, [row][time][width], in torch's order, [time][row][width]
static void draw_steps(Twister& t, float* mask, i64 rows, i64 time, i64 width, double keep) {
  for (i64 step = 0; step < time; step++)
    for (i64 row = 0; row < rows; row++) draw(t, mask + (row * time + step) * width, width, keep);
}
