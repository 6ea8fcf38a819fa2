// What torch does slowly for rows of many clients: float32, one thread, called through ctypes (see kernels.py).
//
// Images lie channels-last, [row][y][x][channel]: eight channels are a vector, and nothing is ever shuffled. Where the
// processor has vectors of sixteen, products are computed with them: each number is still the same sum in the same order.
// Every function has a twin in plain torch that the tests compare it with. NaN and infinities must come through,
// so no flag may assume finite numbers, and comparisons are written so that NaN wins.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

using i64 = std::int64_t;
typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef std::int32_t m8 __attribute__((vector_size(32)));
typedef float narrow __attribute__((vector_size(32)));
#ifdef __AVX512F__
typedef float wide __attribute__((vector_size(64)));
#else
typedef narrow wide;
#endif
constexpr i64 W = sizeof(wide) / sizeof(float);

#define UNROLL _Pragma("GCC unroll 16")
#define ALWAYS static inline __attribute__((always_inline))

ALWAYS v8 load(const float* p) { return *reinterpret_cast<const v8*>(p); }
ALWAYS void store(float* p, v8 v) { *reinterpret_cast<v8*>(p) = v; }
ALWAYS v8 all(float x) { return v8{x, x, x, x, x, x, x, x}; }
template <class T> constexpr i64 lanes = sizeof(T) / sizeof(float);
// for vectors of either length: a template's argument forgets that it may lie anywhere, so copies
template <class T> ALWAYS T load(const float* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class T> ALWAYS void store(float* p, T v) { std::memcpy(p, &v, sizeof v); }
template <class T> ALWAYS T all(float x) { return x - T{}; }

// ── tiles ──────────────────────────────────────────────────────────────────────────────────────────────────────────
//
// Every product here is computed tile by tile: up to TALL rows of two vectors, whose sums stay in registers.

constexpr int TALL = W == 8 ? 6 : 8;

// how many of `left` columns, a multiple of 8, are computed at a time
ALWAYS i64 block_of(i64 left) { return left >= 2 * W ? 2 * W : left >= W ? W : 8; }

// f(vector type, how many of them) for a block of so many columns
template <class F> ALWAYS void with_block(i64 columns, F f) {
  if (columns == 2 * W) f(wide{}, std::integral_constant<int, 2>{});
  else if (columns == W) f(wide{}, std::integral_constant<int, 1>{});
  else f(narrow{}, std::integral_constant<int, 1>{});
}

// f(n) with n a constant, for 1 ≤ n ≤ TALL
template <int N = TALL, class F> ALWAYS void with_constant(i64 n, F f) {
  if (n == N) f(std::integral_constant<int, N>{});
  else if constexpr (N > 1) with_constant<N - 1>(n, f);
}

// f(first, how many) for `count` things in tiles of at most TALL, about equally many in each
template <class F> ALWAYS void in_tiles(i64 count, F f) {
  for (i64 first = 0, tiles = (count + TALL - 1) / TALL; tiles > 0; tiles--) {
    const i64 height = (count - first + tiles - 1) / tiles;
    with_constant(height, [&](auto n) __attribute__((always_inline)) { f(first, n); });
    first += height;
  }
}

// ── convolution ────────────────────────────────────────────────────────────────────────────────────────────────────
//
// Output pixels are sorted into classes that see the same taps of the kernel inside the image, so that padding costs
// nothing, and computed P at a time: P × 8V sums stay in registers while the channels and taps pass by.

struct Shape {
  i64 h, w, c;     // input
  i64 oh, ow, oc;  // output
  i64 kh, kw, sh, sw, ph, pw, dh, dw;
};

struct Taps {  // output positions along one axis that see the taps [first, last)
  i64 first, last;
  std::vector<i64> at;
};

static std::vector<Taps> classes(i64 outputs, i64 inputs, i64 k, i64 stride, i64 padding, i64 dilation) {
  std::vector<Taps> found;
  for (i64 o = 0; o < outputs; o++) {
    const i64 start = o * stride - padding;
    i64 first = 0, last = k;
    while (first < k && start + first * dilation < 0) first++;
    while (last > first && start + (last - 1) * dilation >= inputs) last--;
    auto same = [&](const Taps& t) { return t.first == first && t.last == last; };
    auto it = std::find_if(found.begin(), found.end(), same);
    if (it == found.end()) it = found.insert(found.end(), Taps{first, last, {}});
    it->at.push_back(o);
  }
  return found;
}

template <class T, int P, int V>
ALWAYS void pixels(const Shape& s, const float* x, const i64* in, float* y, const i64* out, const float* weights,
                   const float* bias, const Taps& rows, const Taps& columns) {
  constexpr i64 N = lanes<T>;
  T sum[P][V];
  UNROLL for (int v = 0; v < V; v++) {
    const T start = bias ? load<T>(bias + N * v) : T{};
    UNROLL for (int p = 0; p < P; p++) sum[p][v] = start;
  }
  const float* xs[P];
  UNROLL for (int p = 0; p < P; p++) xs[p] = x + in[p];
  // taps side by side are side by side in memory, with their channels: one run of numbers
  const i64 taps = columns.last - columns.first, runs = s.dw == 1 ? 1 : taps, length = s.dw == 1 ? taps * s.c : s.c;
  for (i64 i = rows.first; i < rows.last; i++)
    for (i64 j = columns.first; j < columns.first + runs; j++) {
      const i64 from = (i * s.dh * s.w + j * s.dw) * s.c;
      const float* w = weights + (i * s.kw + j) * s.c * N * V;
      for (i64 c = from; c < from + length; c++, w += N * V) {
        T wv[V];
        UNROLL for (int v = 0; v < V; v++) wv[v] = load<T>(w + N * v);
        UNROLL for (int p = 0; p < P; p++) {
          const T b = all<T>(xs[p][c]);
          UNROLL for (int v = 0; v < V; v++) sum[p][v] += b * wv[v];
        }
      }
    }
  UNROLL for (int p = 0; p < P; p++) UNROLL for (int v = 0; v < V; v++) store<T>(y + out[p] + N * v, sum[p][v]);
}

template <class T, int V>
static void block_of_channels(const Shape& s, const float* x, float* y, const float* weights, const float* bias,
                              const std::vector<Taps>& rows, const std::vector<Taps>& columns, i64 images,
                              std::vector<i64>& in, std::vector<i64>& out) {
  for (const Taps& r : rows)
    for (const Taps& t : columns) {
      in.clear(), out.clear();
      for (i64 n = 0; n < images; n++)
        for (i64 oy : r.at)
          for (i64 ox : t.at) {
            in.push_back(((n * s.h + oy * s.sh - s.ph) * s.w + ox * s.sw - s.pw) * s.c);
            out.push_back(((n * s.oh + oy) * s.ow + ox) * s.oc);
          }
      in_tiles(static_cast<i64>(in.size()), [&](i64 i, auto p) __attribute__((always_inline)) {
        pixels<T, p, V>(s, x, &in[i], y, &out[i], weights, bias, r, t);
      });
    }
}

// y ← convolution of each group's rows with the group's weights [out][in][kh][kw] (output channels: a multiple of 8).
// With `flipped`, the weights are those of the convolution whose input gradient this is: [in][out][kh][kw], turned round.
extern "C" void convolve(const float* x, const float* weights, const float* bias, float* y, i64 groups, const i64* ends,
                         i64 weights_stride, i64 bias_stride, const Shape* shape, i64 flipped) {
  const Shape s = *shape;
  const auto rows = classes(s.oh, s.h, s.kh, s.sh, s.ph, s.dh);
  const auto columns = classes(s.ow, s.w, s.kw, s.sw, s.pw, s.dw);
  const i64 taps = s.kh * s.kw;
  std::vector<float> packed(taps * s.c * s.oc);
  std::vector<i64> in, out;
  const i64 together = std::max<i64>(1, 32768 / (s.h * s.w * s.c + s.oh * s.ow * s.oc));  // images that fit the L2 cache
  i64 row = 0;
  for (i64 g = 0; g < groups; g++) {
    const float* w = weights + g * weights_stride;
    for (i64 first = 0, size; first < s.oc; first += size) {  // packed: [block of outputs][tap][input][output of the block]
      size = block_of(s.oc - first);
      for (i64 o = first; o < first + size; o++) {
        float* block = packed.data() + first * taps * s.c + (o - first);
        for (i64 c = 0; c < s.c; c++)
          for (i64 t = 0; t < taps; t++)
            block[(t * s.c + c) * size] = flipped ? w[(c * s.oc + o) * taps + taps - 1 - t] : w[(o * s.c + c) * taps + t];
      }
    }
    for (; row < ends[g]; row += std::min(together, ends[g] - row)) {
      const i64 images = std::min(together, ends[g] - row);
      const float* xs = x + row * s.h * s.w * s.c;
      for (i64 first = 0, size; first < s.oc; first += size) {
        size = block_of(s.oc - first);
        const float* block = packed.data() + first * taps * s.c;
        const float* b = bias ? bias + g * bias_stride + first : nullptr;
        float* ys = y + row * s.oh * s.ow * s.oc + first;
        with_block(size, [&](auto vector, auto v) {
          block_of_channels<decltype(vector), v>(s, xs, ys, block, b, rows, columns, images, in, out);
        });
      }
    }
  }
}

// sums[C][V vectors] += Σ over a rectangle of output pixels of x[pixel seen][C] ⊗ dy[pixel][V vectors]
template <class T, int C, int V>
ALWAYS void outer(const Shape& s, const float* x, const float* dy, float* sums, i64 height, i64 width) {
  constexpr i64 N = lanes<T>;
  T sum[C][V];
  UNROLL for (int c = 0; c < C; c++) UNROLL for (int v = 0; v < V; v++) sum[c][v] = load<T>(sums + c * s.oc + N * v);
  const i64 x_step = s.sw * s.c;
  for (i64 i = 0; i < height; i++) {
    const float* xs = x + i * s.sh * s.w * s.c;
    const float* g = dy + i * s.ow * s.oc;
    for (i64 j = 0; j < width; j++, xs += x_step, g += s.oc) {
      T gv[V];
      UNROLL for (int v = 0; v < V; v++) gv[v] = load<T>(g + N * v);
      UNROLL for (int c = 0; c < C; c++) {
        const T b = all<T>(xs[c]);
        UNROLL for (int v = 0; v < V; v++) sum[c][v] += b * gv[v];
      }
    }
  }
  UNROLL for (int c = 0; c < C; c++) UNROLL for (int v = 0; v < V; v++) store<T>(sums + c * s.oc + N * v, sum[c][v]);
}

// gradient[place of client] ← β gradient[…] + that of the client's rows, as [out][in][kh][kw] (output channels: a multiple of 8)
extern "C" void convolution_weights(const float* x, const float* dy, float* gradient, i64 clients, const i64* ends,
                                    const i64* places, i64 gradient_stride, i64 beta, const Shape* shape) {
  const Shape s = *shape;
  const i64 taps = s.kh * s.kw;
  std::vector<float> sums(taps * s.c * s.oc);
  // as many output rows at a time as fit the L1 cache with the input rows they see
  const i64 band = std::max<i64>(1, 5000 / (s.ow * 16 + s.sh * s.w * s.c));
  const bool few = s.c <= 3 && W == 8 && s.oc % 32 == 0;  // few input channels: more output channels at a time
  i64 row = 0;
  for (i64 client = 0; client < clients; client++) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (; row < ends[client]; row++)
      for (i64 top = 0; top < s.oh; top += band)
        for (i64 o = 0, size; o < s.oc; o += size) {
          size = few ? 32 : block_of(s.oc - o);
          for (i64 i = 0; i < s.kh; i++)
            for (i64 j = 0; j < s.kw; j++) {
              // the output rectangle whose tap (i, j) lies inside the image
              const i64 dy0 = i * s.dh - s.ph, dx0 = j * s.dw - s.pw;
              const i64 y0 = std::max(top, dy0 < 0 ? (-dy0 + s.sh - 1) / s.sh : 0);
              const i64 x0 = dx0 < 0 ? (-dx0 + s.sw - 1) / s.sw : 0;
              const i64 y1 = s.h - 1 - dy0 < 0 ? 0 : std::min(std::min(top + band, s.oh), (s.h - 1 - dy0) / s.sh + 1);
              const i64 x1 = s.w - 1 - dx0 < 0 ? 0 : std::min(s.ow, (s.w - 1 - dx0) / s.sw + 1);
              if (y1 <= y0 || x1 <= x0) continue;
              const float* xs = x + ((row * s.h + y0 * s.sh + dy0) * s.w + x0 * s.sw + dx0) * s.c;
              const float* g = dy + ((row * s.oh + y0) * s.ow + x0) * s.oc + o;
              float* to = sums.data() + (i * s.kw + j) * s.c * s.oc + o;
              if (few)
                with_constant<3>(s.c, [&](auto c) { outer<narrow, c, 4>(s, xs, g, to, y1 - y0, x1 - x0); });
              else
                with_block(size, [&](auto vector, auto v) {
                  in_tiles(s.c, [&](i64 c, auto n) __attribute__((always_inline)) {
                    outer<decltype(vector), n, v>(s, xs + c, g, to + c * s.oc, y1 - y0, x1 - x0);
                  });
                });
            }
        }
    float* to = gradient + places[client] * gradient_stride;
    for (i64 o = 0; o < s.oc; o++)
      for (i64 c = 0; c < s.c; c++)
        for (i64 t = 0; t < taps; t++, to++) *to = (beta ? *to : 0.0f) + sums[(t * s.c + c) * s.oc + o];
  }
}

// ── group norm, ReLU, max pool ─────────────────────────────────────────────────────────────────────────────────────
//
// x [row][y][x][c] channels-last (c: a multiple of 8) → y, pooled K × K (K = 1: not pooled, K = 2: stride 2, floor).

struct Norm {
  i64 h, w, c, groups;
  float eps;
};

typedef std::uint8_t b8 __attribute__((vector_size(8)));

ALWAYS m8 load_bytes(const std::uint8_t* p) {
  b8 v;
  std::memcpy(&v, p, 8);
  return __builtin_convertvector(v, m8);
}
ALWAYS void store_bytes(std::uint8_t* p, m8 v) {
  const b8 bytes = __builtin_convertvector(v, b8);
  std::memcpy(p, &bytes, 8);
}

// f(first channel, how many vectors of eight): several at a time, so that pixels are read in the order of memory
template <class F> ALWAYS void by_channels(i64 channels, F f) {
  constexpr int V = W / 4;
  i64 c = 0;
  for (; c + 8 * V <= channels; c += 8 * V) f(c, std::integral_constant<int, V>{});
  for (; c < channels; c += 8) f(c, std::integral_constant<int, 1>{});
}

// per channel: Σ x over pixels, or if SQUARES Σ (x − mean)²
template <bool SQUARES> static void sum_pixels(const Norm& n, const float* x, const float* mean, float* sums) {
  const i64 pixels = n.h * n.w;
  by_channels(n.c, [&](i64 c, auto many) __attribute__((always_inline)) {
    constexpr int V = many;
    v8 sum[4][V] = {}, m[V];
    UNROLL for (int v = 0; v < V; v++) m[v] = SQUARES ? load(mean + c + 8 * v) : all(0);
    const auto add = [&](v8& to, const float* from, int v) __attribute__((always_inline)) {
      const v8 d = load(from + 8 * v) - m[v];
      if constexpr (SQUARES) to += d * d;
      else to += d;
    };
    i64 p = 0;
    for (; p + 4 <= pixels; p += 4)
      UNROLL for (int k = 0; k < 4; k++) UNROLL for (int v = 0; v < V; v++) add(sum[k][v], x + (p + k) * n.c + c, v);
    for (; p < pixels; p++) UNROLL for (int v = 0; v < V; v++) add(sum[0][v], x + p * n.c + c, v);
    UNROLL for (int v = 0; v < V; v++) store(sums + c + 8 * v, (sum[0][v] + sum[1][v]) + (sum[2][v] + sum[3][v]));
  });
}

// per channel: mean and 1/σ of its group
static void moments(const Norm& n, const float* x, float* mean, float* rstd) {
  const i64 pixels = n.h * n.w, per = n.c / n.groups;
  sum_pixels<false>(n, x, nullptr, mean);
  for (i64 g = 0; g < n.groups; g++) {
    double sum = 0;
    for (i64 k = 0; k < per; k++) sum += mean[g * per + k];
    for (i64 k = 0; k < per; k++) mean[g * per + k] = static_cast<float>(sum / (pixels * per));
  }
  sum_pixels<true>(n, x, mean, rstd);
  for (i64 g = 0; g < n.groups; g++) {
    double sum = 0;
    for (i64 k = 0; k < per; k++) sum += rstd[g * per + k];
    const float r = static_cast<float>(1 / std::sqrt(sum / (pixels * per) + n.eps));
    for (i64 k = 0; k < per; k++) rstd[g * per + k] = r;
  }
}

template <int K>
static void norm_pool_row(const Norm& n, const float* x, const float* gamma, const float* beta, float* mean, float* rstd,
                          float* pooled, float* y, std::uint8_t* where) {
  moments(n, x, mean, rstd);
  const i64 ph = n.h / K, pw = n.w / K;
  by_channels(n.c, [&](i64 first, auto many) __attribute__((always_inline)) {
    constexpr int V = many;
    v8 scale[V], m[V], shift[V];
    UNROLL for (int v = 0; v < V; v++) {
      const i64 c = first + 8 * v;
      scale[v] = gamma ? load(rstd + c) * load(gamma + c) : load(rstd + c);
      m[v] = load(mean + c), shift[v] = beta ? load(beta + c) : all(0);
    }
    for (i64 i = 0; i < ph; i++)
      for (i64 j = 0; j < pw; j++) {
        UNROLL for (int v = 0; v < V; v++) {
          const i64 c = first + 8 * v;
          const float* at = x + (i * K * n.w + j * K) * n.c + c;
          v8 best = (load(at) - m[v]) * scale[v] + shift[v];
          m8 which = {};
          UNROLL for (int k = 1; k < K * K; k++) {
            const v8 value = (load(at + (k / K * n.w + k % K) * n.c) - m[v]) * scale[v] + shift[v];
            const m8 better = (value > best) | (value != value);
            best = better ? value : best;
            which = better ? m8{} + k : which;
          }
          const m8 off = best <= 0;
          store(pooled + (i * pw + j) * n.c + c, off ? all(0) : best);
          which |= off & 4;  // bit 2: ReLU is off, no gradient
          store_bytes(where + (i * pw + j) * n.c + c, which);
        }
      }
  });
  for (i64 c = 0; c < n.c; c++)  // the outside world wants [c][y][x]
    for (i64 p = 0; p < ph * pw; p++) y[c * ph * pw + p] = pooled[p * n.c + c];
}

// y [row][c][y/K][x/K]; mean, rstd [row][c]; where [row][y/K][x/K][c]
extern "C" void norm_pool(const float* x, const float* gamma, const float* beta, float* y, float* mean, float* rstd,
                          std::uint8_t* where, i64 groups, const i64* ends, i64 stride, const Norm* norm, i64 k) {
  const Norm n = *norm;
  const i64 size = (n.h / k) * (n.w / k) * n.c;
  std::vector<float> pooled(size);
  i64 row = 0;
  for (i64 g = 0; g < groups; g++)
    for (; row < ends[g]; row++)
      (k == 2 ? norm_pool_row<2> : norm_pool_row<1>)(n, x + row * n.h * n.w * n.c, gamma ? gamma + g * stride : nullptr,
                                                     beta ? beta + g * stride : nullptr, mean + row * n.c, rstd + row * n.c,
                                                     pooled.data(), y + row * size, where + row * size);
}

template <int K>
static void norm_pool_back_row(const Norm& n, const float* x, const float* dy, const std::uint8_t* where, const float* gamma,
                               const float* mean, const float* rstd, float* dx, float* dgamma, float* dbeta, float* dsum,
                               float* a, float* b) {
  const i64 ph = n.h / K, pw = n.w / K, per = n.c / n.groups;
  const float size = static_cast<float>(n.h * n.w * per);
  by_channels(n.c, [&](i64 first, auto many) __attribute__((always_inline)) {  // Σ dy and Σ dy x̂, over the pixels that won
    constexpr int V = many;
    v8 sum[V] = {}, product[V] = {}, m[V], r[V];
    UNROLL for (int v = 0; v < V; v++) m[v] = load(mean + first + 8 * v), r[v] = load(rstd + first + 8 * v);
    for (i64 i = 0; i < ph; i++)
      for (i64 j = 0; j < pw; j++) {
        UNROLL for (int v = 0; v < V; v++) {
          const i64 c = first + 8 * v;
          const m8 which = load_bytes(where + (i * pw + j) * n.c + c);
          const float* at = x + (i * K * n.w + j * K) * n.c + c;
          v8 won = load(at);
          UNROLL for (int k = 1; k < K * K; k++) won = (which & 3) == k ? load(at + (k / K * n.w + k % K) * n.c) : won;
          const v8 g = which >= 4 ? all(0) : load(dy + (i * pw + j) * n.c + c);
          sum[v] += g;
          product[v] += g * ((won - m[v]) * r[v]);
        }
      }
    UNROLL for (int v = 0; v < V; v++) store(dbeta + first + 8 * v, sum[v]), store(dgamma + first + 8 * v, product[v]);
  });
  for (i64 g = 0; g < n.groups; g++) {  // dx = r (γ dy − mean(γ dy) − x̂ mean(γ dy x̂)), means over the group
    double sum = 0, product = 0;
    for (i64 c = g * per; c < (g + 1) * per; c++) {
      sum += (gamma ? gamma[c] : 1.0f) * dbeta[c];
      product += (gamma ? gamma[c] : 1.0f) * dgamma[c];
    }
    for (i64 c = g * per; c < (g + 1) * per; c++) {
      b[c] = static_cast<float>(rstd[c] * rstd[c] * product / size);
      a[c] = static_cast<float>(rstd[c] * sum / size) - b[c] * mean[c];
    }
  }
  by_channels(n.c, [&](i64 first, auto many) __attribute__((always_inline)) {
    constexpr int V = many;
    v8 av[V], bv[V], scale[V], total[V] = {};
    UNROLL for (int v = 0; v < V; v++) {
      const i64 c = first + 8 * v;
      av[v] = load(a + c), bv[v] = load(b + c), scale[v] = gamma ? load(rstd + c) * load(gamma + c) : load(rstd + c);
    }
    for (i64 i = 0; i < ph; i++)
      for (i64 j = 0; j < pw; j++) {
        UNROLL for (int v = 0; v < V; v++) {
          const i64 c = first + 8 * v;
          const m8 which = load_bytes(where + (i * pw + j) * n.c + c);
          const v8 g = load(dy + (i * pw + j) * n.c + c) * scale[v];
          const i64 at = (i * K * n.w + j * K) * n.c + c;
          UNROLL for (int k = 0; k < K * K; k++) {
            const i64 pixel = at + (k / K * n.w + k % K) * n.c;
            const v8 d = (which == k ? g : all(0)) - av[v] - bv[v] * load(x + pixel);
            total[v] += d;
            store(dx + pixel, d);
          }
        }
      }
    for (i64 i = 0; i < n.h; i++)  // what the pool leaves out at the right and at the bottom
      for (i64 j = i < ph * K ? pw * K : 0; j < n.w; j++)
        UNROLL for (int v = 0; v < V; v++) {
          const i64 pixel = (i * n.w + j) * n.c + first + 8 * v;
          const v8 d = -av[v] - bv[v] * load(x + pixel);
          total[v] += d;
          store(dx + pixel, d);
        }
    UNROLL for (int v = 0; v < V; v++) store(dsum + first + 8 * v, total[v]);
  });
}

// dy [row][y/K][x/K][c]; dx like x; dgamma, dbeta and dsum = Σ dx over pixels, each [row][c]
extern "C" void norm_pool_back(const float* x, const float* dy, const std::uint8_t* where, const float* gamma,
                               const float* mean, const float* rstd, float* dx, float* dgamma, float* dbeta, float* dsum,
                               i64 groups, const i64* ends, i64 stride, const Norm* norm, i64 k) {
  const Norm n = *norm;
  const i64 size = (n.h / k) * (n.w / k) * n.c, full = n.h * n.w * n.c;
  std::vector<float> a(n.c), b(n.c);
  i64 row = 0;
  for (i64 g = 0; g < groups; g++)
    for (; row < ends[g]; row++)
      (k == 2 ? norm_pool_back_row<2> : norm_pool_back_row<1>)(
          n, x + row * full, dy + row * size, where + row * size, gamma ? gamma + g * stride : nullptr, mean + row * n.c,
          rstd + row * n.c, dx + row * full, dgamma + row * n.c, dbeta + row * n.c, dsum + row * n.c, a.data(), b.data());
}

// ── small matrices ─────────────────────────────────────────────────────────────────────────────────────────────────

// c[row][V vectors] = start + Σ_k a[row][k] b[k][V vectors], for P rows given by pointers
template <class T, int P, int V>
ALWAYS void rows_times(const float* const* a, i64 k, const float* b, i64 b_stride, const float* start, i64 start_stride,
                       float* c, i64 c_stride) {
  constexpr i64 N = lanes<T>;
  T sum[P][V];
  UNROLL for (int p = 0; p < P; p++)
    UNROLL for (int v = 0; v < V; v++) sum[p][v] = start ? load<T>(start + p * start_stride + N * v) : T{};
  const float* as[P];
  UNROLL for (int p = 0; p < P; p++) as[p] = a[p];
  for (i64 i = 0; i < k; i++, b += b_stride) {
    T bv[V];
    UNROLL for (int v = 0; v < V; v++) bv[v] = load<T>(b + N * v);
    UNROLL for (int p = 0; p < P; p++) {
      const T x = all<T>(as[p][i]);
      UNROLL for (int v = 0; v < V; v++) sum[p][v] += x * bv[v];
    }
  }
  UNROLL for (int p = 0; p < P; p++) UNROLL for (int v = 0; v < V; v++) store<T>(c + p * c_stride + N * v, sum[p][v]);
}

// c = start + a b for a block of columns, b [k][block]; start_stride 0: the same start for every row
static void rows_times_block(i64 block, const float* const* a, i64 rows, i64 k, const float* b, i64 b_stride,
                             const float* start, i64 start_stride, float* c, i64 c_stride) {
  with_block(block, [&](auto vector, auto v) {
    in_tiles(rows, [&](i64 r, auto n) __attribute__((always_inline)) {
      const float* s = start ? start + r * start_stride : nullptr;
      rows_times<decltype(vector), n, v>(a + r, k, b, b_stride, s, start_stride, c + r * c_stride, c_stride);
    });
  });
}

// c = start + a b; columns: a multiple of 8; with `packed`, b lies as `pack` leaves it, else its rows are b_stride apart
static void multiply(const float* const* a, i64 rows, i64 k, const float* b, i64 b_stride, bool packed, const float* start,
                     i64 start_stride, float* c, i64 c_stride, i64 columns) {
  for (i64 o = 0, size; o < columns; o += size) {
    size = block_of(columns - o);
    rows_times_block(size, a, rows, k, packed ? b + o * k : b + o, packed ? size : b_stride, start ? start + o : nullptr,
                     start_stride, c + o, c_stride);
  }
}

// c[C][V vectors] = Σ over rows of a[row][C] ⊗ b[row][V vectors]
template <class T, int C, int V>
ALWAYS void outer_rows(const float* const* a, i64 at, i64 rows, const float* b, i64 b_stride, float* c, i64 c_stride) {
  constexpr i64 N = lanes<T>;
  T sum[C][V] = {};
  for (i64 r = 0; r < rows; r++, b += b_stride) {
    T bv[V];
    UNROLL for (int v = 0; v < V; v++) bv[v] = load<T>(b + N * v);
    UNROLL for (int i = 0; i < C; i++) {
      const T x = all<T>(a[r][at + i]);
      UNROLL for (int v = 0; v < V; v++) sum[i][v] += x * bv[v];
    }
  }
  UNROLL for (int i = 0; i < C; i++) UNROLL for (int v = 0; v < V; v++) store<T>(c + i * c_stride + N * v, sum[i][v]);
}

// c[k][columns] = aᵀ b; columns: at least 8
static void transposed_times(const float* const* a, i64 rows, i64 k, const float* b, i64 b_stride, float* c, i64 c_stride,
                             i64 columns) {
  in_tiles(k, [&](i64 i, auto n) __attribute__((always_inline)) {
    for (i64 o = 0, size; o < columns; o += size) {
      size = block_of(columns - o);
      o = std::min(o, columns - size);  // the last one may overlap what is done, and finds the same
      float* to = c + i * c_stride + o;
      // a matrix that is cold: have the lines of the next tile but one ready to be written
      for (i64 r = 2 * TALL; r < 3 * TALL; r++) __builtin_prefetch(to + r * c_stride, 1);
      with_block(size, [&](auto vector, auto v) __attribute__((always_inline)) {
        outer_rows<decltype(vector), n, v>(a, i, rows, b + o, b_stride, to, c_stride);
      });
    }
  });
}

// c[a columns][b columns] = β c + aᵀ b, for any number of columns; rows lie a_stride and b_stride apart
static void outer_product(const float* a, i64 a_stride, i64 k, const float* b, i64 b_stride, i64 columns, i64 rows, float* c,
                          i64 beta, std::vector<const float*>& pointers, std::vector<float>& scratch) {
  if (columns < 8) {
    for (i64 i = 0; i < k; i++)
      for (i64 o = 0; o < columns; o++) {
        float sum = 0;
        for (i64 r = 0; r < rows; r++) sum += a[r * a_stride + i] * b[r * b_stride + o];
        c[i * columns + o] = (beta ? c[i * columns + o] : 0.0f) + sum;
      }
    return;
  }
  pointers.resize(rows);
  for (i64 r = 0; r < rows; r++) pointers[r] = a + r * a_stride;
  float* to = c;
  if (beta) {
    scratch.resize(k * columns);
    to = scratch.data();
  }
  transposed_times(pointers.data(), rows, k, b, b_stride, to, columns, columns);
  if (beta)
    for (i64 i = 0; i < k * columns; i++) c[i] += to[i];
}

// into[place of client][a columns][b columns] = β into + aᵀ b over the client's rows
extern "C" void outer_products(const float* a, const float* b, float* into, i64 clients, const i64* ends, const i64* places,
                               i64 into_stride, i64 a_columns, i64 b_columns, i64 beta) {
  std::vector<const float*> pointers;
  std::vector<float> scratch;
  for (i64 c = 0, row = 0; c < clients; row = ends[c++])
    outer_product(a + row * a_columns, a_columns, a_columns, b + row * b_columns, b_columns, b_columns, ends[c] - row,
                  into + places[c] * into_stride, beta, pointers, scratch);
}

// into[place of client][columns] = β into + Σ a over the client's rows
extern "C" void client_sums(const float* a, float* into, i64 clients, const i64* ends, const i64* places, i64 into_stride,
                            i64 columns, i64 beta) {
  for (i64 c = 0, row = 0; c < clients; c++) {
    float* to = into + places[c] * into_stride;
    if (!beta) std::fill(to, to + columns, 0.0f);
    for (; row < ends[c]; row++)
      for (i64 i = 0; i < columns; i++) to[i] += a[row * columns + i];
  }
}

// ── dropout ────────────────────────────────────────────────────────────────────────────────────────────────────────
//
// The very masks that torch's CPU generator would give, faster: MT19937, two numbers for each element, 53 bits of them.

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

// e^(x − n ln 2) for n = the integer nearest to x / ln 2, by a polynomial
ALWAYS v8 after_twos(v8 x, v8 n) {
  v8 r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  v8 p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * (r * r) + r + 1.0f;
}

// e^x to an ulp or two: x = n ln 2 + r, a polynomial in r, n into the exponent; 0 below the normal numbers
ALWAYS v8 exponential(v8 x) {
  const v8 low = all(-87.3f), high = all(88.7f);
  const v8 clamped = x < low ? low : (x > high ? high : x);  // NaN stays
  const v8 magic = all(12582912.0f);                         // adding it rounds to an integer, left in the low bits
  const v8 shifted = clamped * 1.44269504f + magic;
  const v8 p = after_twos(clamped, shifted - magic);
  const m8 power = ((m8)shifted - (m8)magic) << 23;
  const v8 y = (v8)((m8)p + power);
  const v8 above = x > high ? all(INFINITY) : y;
  return x < low ? all(0) : (x != x ? x : above);
}

// ── whole trips of a small network ─────────────────────────────────────────────────────────────────────────────────
//
// Linear layers with ReLU between them, and cross entropy: logistic regression and small perceptrons, whose steps are
// so short that calling anything costs more than computing. Weights are kept transposed, [in][out], out filled up to 8.

struct Sgd {
  float lr, momentum, weight_decay, proximal;
  i64 batch_size, epochs, steps, lr_norm;  // steps < 0: as many as the epochs take
};

static std::uint64_t mix(std::uint64_t z) {  // shuffle.py's _mix
  z += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

ALWAYS i64 filled(i64 n) { return (n + 7) / 8 * 8; }

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

struct Client {
  const float* x;
  const i64* y;
  i64 examples;
};

// The examples of trip i are those of table[where[i]], its update goes into row into[i].
// Returns the number of the first trip with a label that is no class, or -1.
extern "C" i64 train_trips(i64 trips, const Client* table, const i64* where, const i64* clients, const i64* numbers,
                           const float* const* starts, const i64* into, float* updates, i64 stride, std::uint64_t hash,
                           i64 layers, const i64* sizes, const i64* bias, const Sgd* how) {
  const Network net(layers, sizes, bias);
  const Sgd sgd = *how;
  const i64 classes = sizes[layers], features = sizes[0];
  std::vector<float> start(net.size), w(net.size), g(net.size), velocity(net.size);
  std::vector<float> turned;                                     // a layer's weights [out][in], for the gradient of its input
  std::vector<std::vector<float>> hidden(layers + 1), dz(2);     // outputs of each layer
  std::vector<std::vector<const float*>> rows(layers + 1);       // pointers to the rows of each layer's input
  std::vector<std::pair<std::uint64_t, i64>> keys;
  std::vector<i64> order;
  const float* loaded = nullptr;
  for (i64 trip = 0; trip < trips; trip++) {
    const auto [x, y, n] = table[where[trip]];
    for (i64 i = 0; i < n; i++)
      if (y[i] < 0 || y[i] >= classes) return trip;
    const std::uint64_t of_trip = mix(mix(hash + static_cast<std::uint64_t>(clients[trip])) + static_cast<std::uint64_t>(numbers[trip]));
    if (loaded != starts[trip]) {
      loaded = starts[trip];
      net.each([&](i64 from, i64 to) { start[to] = loaded[from]; });
    }
    w = start;
    if (sgd.momentum != 0) std::fill(velocity.begin(), velocity.end(), 0.0f);
    order.resize(n);
    const i64 per_epoch = (n + sgd.batch_size - 1) / sgd.batch_size;
    const i64 steps = sgd.steps < 0 ? sgd.epochs * per_epoch : sgd.steps;
    for (i64 step = 0; step < steps; step++) {
      const i64 first = step % per_epoch * sgd.batch_size, count = std::min(sgd.batch_size, n - first);
      if (first == 0) {
        const std::uint64_t of_epoch = mix(of_trip + static_cast<std::uint64_t>(step / per_epoch));
        if (per_epoch == 1) {  // one batch of everything: its order does not matter
          for (i64 i = 0; i < n; i++) order[i] = i;
        } else {
          keys.resize(n);
          for (i64 i = 0; i < n; i++) keys[i] = {mix(of_epoch + static_cast<std::uint64_t>(i) * 0x9E3779B97F4A7C15u), i};
          std::sort(keys.begin(), keys.end());
          for (i64 i = 0; i < n; i++) order[i] = keys[i].second;
        }
      }
      for (auto& r : rows) r.resize(count);
      for (i64 i = 0; i < count; i++) rows[0][i] = x + order[first + i] * features;
      for (i64 l = 0; l < layers; l++) {
        const i64 in = sizes[l], width = filled(sizes[l + 1]);
        std::vector<float>& z = hidden[l];
        z.resize(count * width);
        multiply(rows[l].data(), count, in, &w[net.at[l]], width, false, &w[net.at[l] + in * width], 0, z.data(), width, width);
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
        float top = row[0];
        for (i64 c = 1; c < classes; c++) top = row[c] > top ? row[c] : top;
        for (i64 c = classes; c < wide; c++) row[c] = -INFINITY;
        v8 sums = all(0);
        for (i64 c = 0; c < wide; c += 8) {
          const v8 e = exponential(load(row + c) - top);
          store(row + c, e);
          sums += e;
        }
        float sum = 0;
        for (int k = 0; k < 8; k++) sum += sums[k];
        const float scale = 1 / sum;
        for (i64 c = 0; c < wide; c += 8) store(row + c, load(row + c) * scale);
        row[y[order[first + i]]] -= 1;
        for (i64 c = 0; c < wide; c += 8) store(row + c, load(row + c) / static_cast<float>(count));
      }
      const float* d = p.data();
      for (i64 l = layers - 1; l >= 0; l--) {
        const i64 in = sizes[l], width = filled(sizes[l + 1]);
        float* to = &g[net.at[l]];
        transposed_times(rows[l].data(), count, in, d, width, to, width, width);
        float* b = to + in * width;
        std::fill(b, b + width, 0.0f);
        if (bias[l])
          for (i64 i = 0; i < count; i++)
            for (i64 o = 0; o < width; o += 8) store(b + o, load(b + o) + load(d + i * width + o));
        if (l > 0) {
          const i64 out = sizes[l + 1], wide_in = filled(in);
          turned.assign(out * wide_in, 0.0f);
          for (i64 i = 0; i < in; i++)
            for (i64 o = 0; o < out; o++) turned[o * wide_in + i] = w[net.at[l] + i * width + o];
          std::vector<float>& next = dz[l % 2];
          next.resize(count * wide_in);
          std::vector<const float*>& ds = rows[layers];  // no longer needed
          for (i64 i = 0; i < count; i++) ds[i] = d + i * width;
          multiply(ds.data(), count, out, turned.data(), wide_in, false, nullptr, 0, next.data(), wide_in, wide_in);
          const float* h = hidden[l - 1].data();
          for (i64 i = 0; i < count * wide_in; i += 8) store(&next[i], load(h + i) <= 0 ? all(0) : load(&next[i]));
          d = next.data();
        }
      }
      const float lr = sgd.lr_norm ? sgd.lr * static_cast<float>(count) / static_cast<float>(sgd.batch_size) : sgd.lr;
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

// ── LSTM ───────────────────────────────────────────────────────────────────────────────────────────────────────────
//
// One layer in one direction. Everything lies [row][time][…], so that the rows of a client are one matrix for the
// gradients of weights, which are left to a matrix library; here is what has to go step by step. 4 · hidden: a multiple of 8.

ALWAYS v8 bounded_exponential(v8 x) {  // e^x between e^−87 and e^88, and NaN
  const v8 low = all(-87.0f), high = all(88.0f), magic = all(12582912.0f);
  x = low > x ? low : x;
  x = high < x ? high : x;
  const v8 shifted = x * 1.44269504f + magic;
  const v8 p = after_twos(x, shifted - magic);
  return p * (v8)(((m8)shifted << 23) + 0x3f800000);  // a product, for NaN to stay
}

ALWAYS v8 sigmoid(v8 x) { return 1.0f / (1.0f + bounded_exponential(-x)); }

ALWAYS v8 hyperbolic(v8 x) {  // tanh: a polynomial near 0, where 1 − 2/(e^2x + 1) would lose digits
  const v8 z = x * x;
  v8 p = all(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z + -5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z + -3.33332819422e-1f;
  const v8 small = p * z * x + x;
  const v8 large = 1.0f - 2.0f / (bounded_exponential(x + x) + 1.0f);
  return z < 0.390625f ? small : large;
}

ALWAYS void copy_some(float* to, const float* from, i64 n) {  // n < 8, in pieces of a fixed size
  if (n & 4) std::memcpy(to, from, 16);
  if (n & 2) std::memcpy(to + (n & 4), from + (n & 4), 8);
  if (n & 1) to[n & 6] = from[n & 6];
}
ALWAYS v8 load_some(const float* p, i64 n) {  // the first n of eight, else zeros
  if (n >= 8) return load(p);
  float values[8] = {};
  copy_some(values, p, n);
  return load(values);
}
ALWAYS void store_some(float* p, v8 v, i64 n) {
  if (n >= 8) return store(p, v);
  float values[8];
  store(values, v);
  copy_some(p, values, n);
}

// f(k, how many) for k = 0, 8, …; how many is a constant but for the rest, so that no branch is left in the loop
template <class F> ALWAYS void eight_by_eight(i64 size, F f) {
  i64 k = 0;
  for (; k + 8 <= size; k += 8) f(k, std::integral_constant<i64, 8>{});
  if (k < size) f(k, size - k);
}

// blocks of columns, the last filled up with zeros to a multiple of 8: [block][k][columns of the block]
template <class F> static void pack(std::vector<float>& packed, i64 k, i64 columns, F weight) {
  packed.assign(k * filled(columns), 0.0f);
  for (i64 first = 0, size; first < columns; first += size) {
    size = block_of(filled(columns) - first);
    for (i64 o = first; o < std::min(first + size, columns); o++)
      for (i64 i = 0; i < k; i++) packed[first * k + i * size + o - first] = weight(i, o);
  }
}

// x [row][time][features] → gates i, f, g, o [row][time][4 hidden]; h, c, tanh c and the h before each
// step [row][time][hidden], but h with strides of its own. w_in [group][4 hidden][features], w [group][4 hidden][hidden], bias [group][4 hidden] or null.
extern "C" void lstm(const float* x, const float* w_in, float* gates, const float* w, const float* bias, float* h, float* before, float* c, float* tanh_c,
                     i64 groups, const i64* ends, i64 w_in_stride, i64 w_stride, i64 bias_stride, i64 time, i64 features,
                     i64 hidden, i64 backwards, i64 h_row, i64 h_time) {
  const i64 four = 4 * hidden;
  std::vector<float> packed, packed_in;
  std::vector<const float*> from, from_in;
  i64 first = 0;
  for (i64 g = 0; g < groups; g++) {
    const i64 rows = ends[g] - first;
    const float* wg = w + g * w_stride;
    const float* bg = bias ? bias + g * bias_stride : nullptr;
    const float* wi = w_in + g * w_in_stride;
    pack(packed, hidden, four, [&](i64 k, i64 o) { return wg[o * hidden + k]; });
    pack(packed_in, features, four, [&](i64 k, i64 o) { return wi[o * features + k]; });
    from.resize(rows), from_in.resize(rows);
    for (i64 step = 0; step < time; step++) {
      const i64 t = backwards ? time - 1 - step : step, previous = backwards ? t + 1 : t - 1;
      const i64 ahead = step + 1 == time ? 0 : backwards ? -1 : 1;
      float* z = gates + (first * time + t) * four;
      for (i64 r = 0; r < rows; r++) {
        float* to = before + ((first + r) * time + t) * hidden;
        from[r] = to;
        from_in[r] = x + ((first + r) * time + t) * features;
        if (step) std::memcpy(to, h + (first + r) * h_row + previous * h_time, hidden * sizeof(float));
        else std::fill(to, to + hidden, 0.0f);
      }
      multiply(from_in.data(), rows, features, packed_in.data(), 0, true, bg, 0, z, time * four, four);
      if (step) multiply(from.data(), rows, hidden, packed.data(), 0, true, z, time * four, z, time * four, four);
      for (i64 r = 0; r < rows; r++) {
        float* zr = z + r * time * four;
        float* hr = h + (first + r) * h_row + t * h_time;
        const i64 at = ((first + r) * time + t) * hidden, at_previous = ((first + r) * time + previous) * hidden;
        for (i64 q = 0; q < 4; q++)  // gate by gate, so that many short chains of operations are under way at once
          eight_by_eight(hidden, [&](i64 k, auto n) __attribute__((always_inline)) {
            const v8 part = load_some(zr + q * hidden + k, n);
            store_some(zr + q * hidden + k, q == 2 ? hyperbolic(part) : sigmoid(part), n);
          });
        eight_by_eight(hidden, [&](i64 k, auto n) __attribute__((always_inline)) {
          v8 state = load_some(zr + k, n) * load_some(zr + 2 * hidden + k, n);
          if (step) state += load_some(zr + hidden + k, n) * load_some(c + at_previous + k, n);
          const v8 squashed = hyperbolic(state);
          store_some(c + at + k, state, n), store_some(tanh_c + at + k, squashed, n);
          store_some(hr + k, load_some(zr + 3 * hidden + k, n) * squashed, n);
          // rows lie far apart: no hardware guesses that the next time step is wanted next
          for (i64 q = 0; q < 4; q++) __builtin_prefetch(zr + ahead * four + q * hidden + k);
          __builtin_prefetch(c + at + ahead * hidden + k), __builtin_prefetch(tanh_c + at + ahead * hidden + k);
        });
      }
    }
    first = ends[g];
  }
}

// dgates [row][time][4 hidden] from dh [row][time][hidden] and dc, that of the last state [row][hidden], which is used up
extern "C" void lstm_back(const float* gates, const float* w, const float* c, const float* tanh_c, const float* dh, float* dc,
                          float* dgates, i64 groups, const i64* ends, i64 w_stride, i64 time, i64 hidden, i64 backwards, i64 dh_row,
                          i64 dh_time) {
  const i64 four = 4 * hidden, wide = filled(hidden);
  std::vector<float> packed, recurrent;
  std::vector<const float*> from;
  i64 first = 0;
  for (i64 g = 0; g < groups; g++) {
    const i64 rows = ends[g] - first;
    const float* wg = w + g * w_stride;
    pack(packed, four, hidden, [&](i64 k, i64 o) { return wg[k * hidden + o]; });
    from.resize(rows);
    recurrent.assign(rows * wide, 0.0f);
    for (i64 step = time - 1; step >= 0; step--) {
      const i64 t = backwards ? time - 1 - step : step, previous = backwards ? t + 1 : t - 1;
      const i64 ahead = step == 0 ? 0 : backwards ? 1 : -1;
      for (i64 r = 0; r < rows; r++) {
        const i64 row = first + r, at = (row * time + t) * hidden, at_previous = (row * time + previous) * hidden;
        const float* z = gates + (row * time + t) * four;
        const float* dhr = dh + row * dh_row + t * dh_time;
        float* d = dgates + (row * time + t) * four;
        from[r] = d;
        eight_by_eight(hidden, [&](i64 k, auto n) __attribute__((always_inline)) {
          const v8 i = load_some(z + k, n), f = load_some(z + hidden + k, n);
          const v8 u = load_some(z + 2 * hidden + k, n), o = load_some(z + 3 * hidden + k, n);
          const v8 squashed = load_some(tanh_c + at + k, n);
          const v8 up = load_some(dhr + k, n) + load(&recurrent[r * wide + k]);
          const v8 state = load_some(dc + row * hidden + k, n) + up * o * (1.0f - squashed * squashed);
          const v8 old = step ? load_some(c + at_previous + k, n) : all(0);
          store_some(d + k, state * u * i * (1.0f - i), n);
          store_some(d + hidden + k, state * old * f * (1.0f - f), n);
          store_some(d + 2 * hidden + k, state * i * (1.0f - u * u), n);
          store_some(d + 3 * hidden + k, up * squashed * o * (1.0f - o), n);
          store_some(dc + row * hidden + k, state * f, n);
          for (i64 q = 0; q < 4; q++) __builtin_prefetch(z + ahead * four + q * hidden + k);
          __builtin_prefetch(c + at + 2 * ahead * hidden + k), __builtin_prefetch(tanh_c + at + ahead * hidden + k);
          for (i64 q = 0; q < 4; q++) __builtin_prefetch(d + ahead * four + q * hidden + k, 1);
        });
      }
      if (step) multiply(from.data(), rows, four, packed.data(), 0, true, nullptr, 0, recurrent.data(), wide, wide);
    }
    first = ends[g];
  }
}
