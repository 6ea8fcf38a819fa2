// Rows of words on their way into an LSTM, of which most is alike: what a word makes of the gates is computed where it stands
// first, and rows that begin with the same words, padding mostly, have the same states until they part.

#pragma once

#include "lstm.h"

constexpr i64 NEAR = 64;  // a row is compared with so many before it: all of most passes

using PairsOfRows = std::vector<std::pair<const float*, const float*>>;

struct Texts {
  const i64 time, features;
  const float* const vectors;  // [word][features]
  std::vector<const i64*> rows;
  Alike alike;                  // rows that begin with the same words
  std::vector<i64> first_place;  // of every word, where it stands first, from 1, or 0
  std::vector<i64> same, slot;  // of every place, where its word stands first; of that, where its gates are kept, or -1
  std::vector<float> kept;
  PairsOfRows pairs;

  Texts(i64 words, i64 time, i64 features, const float* vectors)
      : time(time), features(features), vectors(vectors), first_place(words) {}

  const float* vector_of(i64 r, i64 t) const { return vectors + rows[r][t] * features; }

  // Look at the rows: which are alike, and where a word stands again.
  void read(i64 four) {
    const i64 count = static_cast<i64>(rows.size());
    alike.as.assign(count, 0), alike.until.assign(count, 0);
    for (i64 r = 1; r < count; r++)
      for (i64 q = std::max<i64>(0, r - NEAR); q < r && alike.until[r] < time; q++) {
        const i64 length = std::mismatch(rows[r], rows[r] + time, rows[q]).first - rows[r];
        if (length > alike.until[r]) alike.until[r] = length, alike.as[r] = q;
      }
    same.assign(count * time, 0), slot.assign(count * time, -1);
    i64 slots = 0;
    for (i64 t = 0; t < time; t++)
      for (i64 r = 0; r < count; r++) {
        if (t < alike.until[r]) continue;
        i64& first = first_place[rows[r][t]];
        if (!first) {
          first = r * time + t + 1;
          for (i64 i = 0; i < features; i += 16) __builtin_prefetch(vector_of(r, t) + i);  // it may lie anywhere
        } else if (slot[first - 1] < 0) {
          slot[first - 1] = slots++;
        }
        same[r * time + t] = first - 1;
      }
    for (const i64* row : rows)
      for (i64 t = 0; t < time; t++) first_place[row[t]] = 0;
    if (slots * four > static_cast<i64>(kept.size())) kept.resize(slots * four);
  }

  // What the gates begin with at time t, for `lstm_rows`: a product where a word stands first, and elsewhere what came of it.
  template <class Factor>
  void begin(i64 t, Rows<float> z, i64 count, const i64* which, const Factor* w, const float* bias, i64 four) {
    std::vector<i64> firsts;
    std::vector<const float*> from;
    for (i64 i = 0; i < count; i++)
      if (same[which[i] * time + t] == which[i] * time + t) firsts.push_back(which[i]), from.push_back(vector_of(which[i], t));
    const Rows<float> to{z.first, z.stride, firsts.data()};
    multiply(from.data(), static_cast<i64>(from.size()), features, w, {bias, 0}, to, four);
    const auto keep = [&](i64 place) { return kept.data() + slot[place] * four; };
    for (const i64 r : firsts)
      if (slot[r * time + t] >= 0) std::copy_n(z.first + r * z.stride, four, keep(r * time + t));
    for (i64 i = 0; i < count; i++)
      if (const i64 place = which[i] * time + t; same[place] != place) std::copy_n(keep(same[place]), four, z(i));
  }

  // The gradients of gates [row][time][four] of some rows with the words that these saw; words of zeros add nothing.
  const PairsOfRows& with_gradients(i64 first, i64 count, const float* dgates, i64 four) {
    pairs.clear();
    for (i64 r = first; r < first + count; r++)
      for (i64 t = 0; t < time; t++, dgates += four) {
        const float* x = vector_of(r, t);
        if (std::any_of(x, x + features, [](float number) { return number != 0; })) pairs.emplace_back(dgates, x);
      }
    return pairs;
  }
};
