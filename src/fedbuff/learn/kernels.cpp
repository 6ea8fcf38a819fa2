// What torch does slowly for rows of many clients: float32, one thread, called through ctypes (see kernels.py).
//
// Images lie channels-last, [row][y][x][channel]: eight channels are a vector, and nothing is ever shuffled.
// Every function has a twin in plain torch that the tests compare it with. NaN and infinities must come through,
// so no flag may assume finite numbers, and comparisons are written so that NaN wins.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using i64 = std::int64_t;
typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef std::int32_t m8 __attribute__((vector_size(32)));

#define UNROLL _Pragma("GCC unroll 16")
#define ALWAYS static inline __attribute__((always_inline))

ALWAYS v8 load(const float* p) { return *reinterpret_cast<const v8*>(p); }
ALWAYS void store(float* p, v8 v) { *reinterpret_cast<v8*>(p) = v; }
ALWAYS v8 all(float x) { return v8{x, x, x, x, x, x, x, x}; }

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

template <int P, int V>
ALWAYS void pixels(const Shape& s, const float* x, const i64* in, float* y, const i64* out, const float* weights,
                   const float* bias, const Taps& rows, const Taps& columns) {
  v8 sum[P][V];
  UNROLL for (int v = 0; v < V; v++) {
    const v8 start = bias ? load(bias + 8 * v) : all(0);
    UNROLL for (int p = 0; p < P; p++) sum[p][v] = start;
  }
  const float* xs[P];
  UNROLL for (int p = 0; p < P; p++) xs[p] = x + in[p];
  for (i64 i = rows.first; i < rows.last; i++)
    for (i64 j = columns.first; j < columns.last; j++) {
      const i64 tap = (i * s.dh * s.w + j * s.dw) * s.c;
      const float* w = weights + (i * s.kw + j) * s.c * 8 * V;
      for (i64 c = 0; c < s.c; c++, w += 8 * V) {
        v8 wv[V];
        UNROLL for (int v = 0; v < V; v++) wv[v] = load(w + 8 * v);
        UNROLL for (int p = 0; p < P; p++) {
          const v8 b = all(xs[p][tap + c]);
          UNROLL for (int v = 0; v < V; v++) sum[p][v] += b * wv[v];
        }
      }
    }
  UNROLL for (int p = 0; p < P; p++) UNROLL for (int v = 0; v < V; v++) store(y + out[p] + 8 * v, sum[p][v]);
}

template <int V>
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
      const i64 count = static_cast<i64>(in.size());
      i64 i = 0;
      for (; i + 6 <= count; i += 6) pixels<6, V>(s, x, &in[i], y, &out[i], weights, bias, r, t);
      switch (count - i) {
        case 5: pixels<5, V>(s, x, &in[i], y, &out[i], weights, bias, r, t); break;
        case 4: pixels<4, V>(s, x, &in[i], y, &out[i], weights, bias, r, t); break;
        case 3: pixels<3, V>(s, x, &in[i], y, &out[i], weights, bias, r, t); break;
        case 2: pixels<2, V>(s, x, &in[i], y, &out[i], weights, bias, r, t); break;
        case 1: pixels<1, V>(s, x, &in[i], y, &out[i], weights, bias, r, t); break;
      }
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
    for (i64 o = 0; o < s.oc; o++) {  // packed: [block of 16 (or 8) outputs][tap][input][output of the block]
      const i64 first = o / 16 * 16, width = std::min<i64>(16, s.oc - first);
      float* block = packed.data() + first * taps * s.c + (o - first);
      for (i64 c = 0; c < s.c; c++)
        for (i64 t = 0; t < taps; t++)
          block[(t * s.c + c) * width] = flipped ? w[(c * s.oc + o) * taps + taps - 1 - t] : w[(o * s.c + c) * taps + t];
    }
    for (; row < ends[g]; row += std::min(together, ends[g] - row)) {
      const i64 images = std::min(together, ends[g] - row);
      const float* xs = x + row * s.h * s.w * s.c;
      for (i64 first = 0; first < s.oc; first += 16) {
        const float* block = packed.data() + first * taps * s.c;
        const float* b = bias ? bias + g * bias_stride + first : nullptr;
        float* ys = y + row * s.oh * s.ow * s.oc + first;
        if (s.oc - first >= 16)
          block_of_channels<2>(s, xs, ys, block, b, rows, columns, images, in, out);
        else
          block_of_channels<1>(s, xs, ys, block, b, rows, columns, images, in, out);
      }
    }
  }
}

// sums[C][8V] += Σ over a rectangle of output pixels of x[pixel seen][C] ⊗ dy[pixel][8V]
template <int C, int V>
ALWAYS void outer(const Shape& s, const float* x, const float* dy, float* sums, i64 height, i64 width) {
  v8 sum[C][V];
  UNROLL for (int c = 0; c < C; c++) UNROLL for (int v = 0; v < V; v++) sum[c][v] = load(sums + c * s.oc + 8 * v);
  const i64 x_step = s.sw * s.c;
  for (i64 i = 0; i < height; i++) {
    const float* xs = x + i * s.sh * s.w * s.c;
    const float* g = dy + i * s.ow * s.oc;
    for (i64 j = 0; j < width; j++, xs += x_step, g += s.oc) {
      v8 gv[V];
      UNROLL for (int v = 0; v < V; v++) gv[v] = load(g + 8 * v);
      UNROLL for (int c = 0; c < C; c++) {
        const v8 b = all(xs[c]);
        UNROLL for (int v = 0; v < V; v++) sum[c][v] += b * gv[v];
      }
    }
  }
  UNROLL for (int c = 0; c < C; c++) UNROLL for (int v = 0; v < V; v++) store(sums + c * s.oc + 8 * v, sum[c][v]);
}

template <int V>
static void outer_of_inputs(const Shape& s, const float* x, const float* dy, float* sums, i64 height, i64 width) {
  for (i64 c = 0; c < s.c;) {
    const i64 left = s.c - c;
    const float* xs = x + c;
    float* to = sums + c * s.oc;
    if constexpr (V == 4) {
      if (left >= 3) outer<3, V>(s, xs, dy, to, height, width), c += 3;
      else if (left == 2) outer<2, V>(s, xs, dy, to, height, width), c += 2;
      else outer<1, V>(s, xs, dy, to, height, width), c += 1;
    } else {
      if (left >= 6 && left != 8) outer<6, V>(s, xs, dy, to, height, width), c += 6;
      else if (left >= 4) outer<4, V>(s, xs, dy, to, height, width), c += 4;
      else if (left == 3) outer<3, V>(s, xs, dy, to, height, width), c += 3;
      else if (left == 2) outer<2, V>(s, xs, dy, to, height, width), c += 2;
      else outer<1, V>(s, xs, dy, to, height, width), c += 1;
    }
  }
}

// gradient[client] ← β gradient[client] + that of the client's rows, as [out][in][kh][kw] (output channels: a multiple of 8)
extern "C" void convolution_weights(const float* x, const float* dy, float* gradient, i64 clients, const i64* ends,
                                    i64 gradient_stride, i64 beta, const Shape* shape) {
  const Shape s = *shape;
  const i64 taps = s.kh * s.kw;
  std::vector<float> sums(taps * s.c * s.oc);
  // as many output rows at a time as fit the L1 cache with the input rows they see
  const i64 band = std::max<i64>(1, 5000 / (s.ow * 16 + s.sh * s.w * s.c));
  const bool narrow = s.c <= 3 && s.oc % 32 == 0;
  i64 row = 0;
  for (i64 client = 0; client < clients; client++) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (; row < ends[client]; row++)
      for (i64 top = 0; top < s.oh; top += band)
        for (i64 o = 0; o < s.oc; o += narrow ? 32 : 16)
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
              if (narrow) outer_of_inputs<4>(s, xs, g, to, y1 - y0, x1 - x0);
              else if (s.oc - o >= 16) outer_of_inputs<2>(s, xs, g, to, y1 - y0, x1 - x0);
              else outer_of_inputs<1>(s, xs, g, to, y1 - y0, x1 - x0);
            }
    float* to = gradient + client * gradient_stride;
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

// per channel: mean and 1/σ of its group
static void moments(const Norm& n, const float* x, float* mean, float* rstd) {
  const i64 pixels = n.h * n.w, per = n.c / n.groups;
  for (i64 c = 0; c < n.c; c += 8) {
    v8 sum[4] = {all(0), all(0), all(0), all(0)};
    i64 p = 0;
    for (; p + 4 <= pixels; p += 4) UNROLL for (int k = 0; k < 4; k++) sum[k] += load(x + (p + k) * n.c + c);
    for (; p < pixels; p++) sum[0] += load(x + p * n.c + c);
    store(mean + c, (sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
  for (i64 g = 0; g < n.groups; g++) {
    double sum = 0;
    for (i64 k = 0; k < per; k++) sum += mean[g * per + k];
    for (i64 k = 0; k < per; k++) mean[g * per + k] = static_cast<float>(sum / (pixels * per));
  }
  for (i64 c = 0; c < n.c; c += 8) {
    v8 sum[4] = {all(0), all(0), all(0), all(0)};
    const v8 m = load(mean + c);
    i64 p = 0;
    for (; p + 4 <= pixels; p += 4)
      UNROLL for (int k = 0; k < 4; k++) {
        const v8 d = load(x + (p + k) * n.c + c) - m;
        sum[k] += d * d;
      }
    for (; p < pixels; p++) {
      const v8 d = load(x + p * n.c + c) - m;
      sum[0] += d * d;
    }
    store(rstd + c, (sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
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
  for (i64 c = 0; c < n.c; c += 8) {
    const v8 scale = gamma ? load(rstd + c) * load(gamma + c) : load(rstd + c);
    const v8 m = load(mean + c), shift = beta ? load(beta + c) : all(0);
    for (i64 i = 0; i < ph; i++)
      for (i64 j = 0; j < pw; j++) {
        const float* at = x + (i * K * n.w + j * K) * n.c + c;
        v8 best = (load(at) - m) * scale + shift;
        m8 which = {};
        UNROLL for (int k = 1; k < K * K; k++) {
          const v8 v = (load(at + (k / K * n.w + k % K) * n.c) - m) * scale + shift;
          const m8 better = (v > best) | (v != v);
          best = better ? v : best;
          which = better ? m8{} + k : which;
        }
        const m8 off = best <= 0;
        store(pooled + (i * pw + j) * n.c + c, off ? all(0) : best);
        which |= off & 4;  // bit 2: ReLU is off, no gradient
        std::uint8_t* to = where + (i * pw + j) * n.c + c;
        UNROLL for (int k = 0; k < 8; k++) to[k] = static_cast<std::uint8_t>(which[k]);
      }
  }
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
  for (i64 c = 0; c < n.c; c += 8) {  // Σ dy and Σ dy x̂ per channel, over the pixels that won their window
    v8 sum = all(0), product = all(0);
    const v8 m = load(mean + c), r = load(rstd + c);
    for (i64 i = 0; i < ph; i++)
      for (i64 j = 0; j < pw; j++) {
        const std::uint8_t* w = where + (i * pw + j) * n.c + c;
        m8 which;
        UNROLL for (int k = 0; k < 8; k++) which[k] = w[k];
        const float* at = x + (i * K * n.w + j * K) * n.c + c;
        v8 v = load(at);
        UNROLL for (int k = 1; k < K * K; k++) v = (which & 3) == k ? load(at + (k / K * n.w + k % K) * n.c) : v;
        const v8 g = which >= 4 ? all(0) : load(dy + (i * pw + j) * n.c + c);
        sum += g;
        product += g * ((v - m) * r);
      }
    store(dbeta + c, sum);
    store(dgamma + c, product);
  }
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
  for (i64 c = 0; c < n.c; c += 8) {
    const v8 av = load(a + c), bv = load(b + c), scale = gamma ? load(rstd + c) * load(gamma + c) : load(rstd + c);
    v8 total = all(0);
    for (i64 i = 0; i < ph; i++)
      for (i64 j = 0; j < pw; j++) {
        const std::uint8_t* w = where + (i * pw + j) * n.c + c;
        m8 which;
        UNROLL for (int k = 0; k < 8; k++) which[k] = w[k];
        const v8 g = load(dy + (i * pw + j) * n.c + c) * scale;
        const i64 at = (i * K * n.w + j * K) * n.c + c;
        UNROLL for (int k = 0; k < K * K; k++) {
          const i64 pixel = at + (k / K * n.w + k % K) * n.c;
          const v8 d = (which == k ? g : all(0)) - av - bv * load(x + pixel);
          total += d;
          store(dx + pixel, d);
        }
      }
    for (i64 i = 0; i < n.h; i++)  // what the pool leaves out at the right and at the bottom
      for (i64 j = i < ph * K ? pw * K : 0; j < n.w; j++) {
        const i64 pixel = (i * n.w + j) * n.c + c;
        const v8 d = -av - bv * load(x + pixel);
        total += d;
        store(dx + pixel, d);
      }
    store(dsum + c, total);
  }
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
