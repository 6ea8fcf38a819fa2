// The very masks that torch's CPU generator would give, faster: MT19937, two numbers for each element, 53 bits of them.

#include <algorithm>
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

extern "C" void seed_twisters(Twister* twisters, const i64* seeds, i64 count) {
  for (i64 i = 0; i < count; i++) {
    std::uint32_t* s = twisters[i].state;
    s[0] = static_cast<std::uint32_t>(seeds[i]);
    for (std::uint32_t k = 1; k < 624; k++) s[k] = 1812433253u * (s[k - 1] ^ (s[k - 1] >> 30)) + k;
    twisters[i].next = 624;
  }
}

// mask ← 1/keep or 0 for each client's rows, [row][size]; with time > 0 a row is [time][size / time], and numbers are drawn
// for [time][row][size / time]
extern "C" void draw_masks(Twister* twisters, const i64* whose, float* mask, i64 clients, const i64* ends, i64 size, i64 time,
                           double keep) {
  const i64 steps = std::max<i64>(time, 1), width = size / steps;
  const float on = static_cast<float>(1 / keep);
  for (i64 c = 0, first = 0; c < clients; first = ends[c++]) {
    Twister& t = twisters[whose[c]];
    for (i64 step = 0; step < steps; step++)
      for (i64 row = first; row < ends[c]; row++) {
        float* to = mask + row * size + step * width;
        for (i64 i = 0; i < width; i++) {
          if (t.next == 624) refill(t);  // 624 is even: a pair never straddles
          const std::uint32_t high = t.numbers[t.next], low = t.numbers[t.next + 1];
          t.next += 2;
          const std::uint64_t bits = (static_cast<std::uint64_t>(high) << 32 | low) & ((1ull << 53) - 1);
          to[i] = static_cast<double>(static_cast<i64>(bits)) * 0x1p-53 < keep ? on : 0.0f;
        }
      }
  }
}
