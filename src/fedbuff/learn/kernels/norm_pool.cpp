// Group norm, ReLU and max pool in one pass, and back.
//
// x [row][y][x][c] channels-last (c: a multiple of 8) → y, pooled K × K (K = 1: not pooled, K = 2: stride 2, floor).

#include <cmath>
#include <vector>

#include "tiles.h"

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
