// The very masks that torch's CPU generator would give, faster.

#include "twister.h"

extern "C" void seed_twisters(Twister* twisters, const i64* seeds, i64 count) {
  for (i64 i = 0; i < count; i++) seed(twisters[i], static_cast<std::uint32_t>(seeds[i]));
}

// mask ← 1/keep or 0 for each client's rows, [row][size]; with time > 0 a row is [time][size / time], and numbers are drawn
// for [time][row][size / time]
extern "C" void draw_masks(Twister* twisters, const i64* whose, float* mask, i64 clients, const i64* ends, i64 size, i64 time,
                           double keep) {
  for (i64 c = 0, first = 0; c < clients; first = ends[c++]) {
    const i64 rows = ends[c] - first;
    float* to = mask + first * size;
    if (time > 0) draw_steps(twisters[whose[c]], to, rows, time, size / time, keep);
    else draw(twisters[whose[c]], to, rows * size, keep);
  }
}
