// Convolutions of channels-last images, [row][y][x][channel]: eight channels are a vector, and numbers of float32 are never
// shuffled.
//
// Output pixels are sorted into classes that see the same taps of the kernel inside the image, so that padding costs
// nothing, and computed P at a time: P × 8V sums stay in registers while the channels and taps pass by.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "factors.h"
#include "tiles.h"

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

// Offsets of x, `in`, count factors, of which a pixel has `c`.
template <class T, int P, int V, class Factor>
ALWAYS void pixels(const Shape& s, i64 c, const Factor* x, const i64* in, float* y, const i64* out, const Factor* weights,
                   const float* bias, const Taps& rows, const Taps& columns) {
  constexpr i64 N = lanes<T>;
  T sum[P][V];
  UNROLL for (int v = 0; v < V; v++) {
    const T start = bias ? load<T>(bias + N * v) : T{};
    UNROLL for (int p = 0; p < P; p++) sum[p][v] = start;
  }
  const Factor* xs[P];
  UNROLL for (int p = 0; p < P; p++) xs[p] = x + in[p];
  // taps side by side are side by side in memory, with their channels: one run of factors
  const i64 taps = columns.last - columns.first, runs = s.dw == 1 ? 1 : taps, length = s.dw == 1 ? taps * c : c;
  for (i64 i = rows.first; i < rows.last; i++)
    for (i64 j = columns.first; j < columns.first + runs; j++) {
      const i64 from = (i * s.dh * s.w + j * s.dw) * c;
      const Factor* w = weights + (i * s.kw + j) * c * N * V;
      for (i64 k = from; k < from + length; k++, w += N * V) {
        decltype(load_factors<T>(w)) wv[V];
        UNROLL for (int v = 0; v < V; v++) wv[v] = load_factors<T>(w + N * v);
        UNROLL for (int p = 0; p < P; p++) {
          const auto b = all_factors<T>(xs[p][k]);
          UNROLL for (int v = 0; v < V; v++) sum[p][v] = plus_product<T>(sum[p][v], b, wv[v]);
        }
      }
    }
  UNROLL for (int p = 0; p < P; p++) UNROLL for (int v = 0; v < V; v++) store<T>(y + out[p] + N * v, sum[p][v]);
}

template <class T, int V, class Factor>
static void block_of_channels(const Shape& s, i64 c, const Factor* x, float* y, const Factor* weights, const float* bias,
                              const std::vector<Taps>& rows, const std::vector<Taps>& columns, i64 images,
                              std::vector<i64>& in, std::vector<i64>& out) {
  for (const Taps& r : rows)
    for (const Taps& t : columns) {
      in.clear(), out.clear();
      for (i64 n = 0; n < images; n++)
        for (i64 oy : r.at)
          for (i64 ox : t.at) {
            in.push_back(((n * s.h + oy * s.sh - s.ph) * s.w + ox * s.sw - s.pw) * c);
            out.push_back(((n * s.oh + oy) * s.ow + ox) * s.oc);
          }
      in_tiles(static_cast<i64>(in.size()), [&](i64 i, auto p) __attribute__((always_inline)) {
        pixels<T, p, V>(s, c, x, &in[i], y, &out[i], weights, bias, r, t);
      });
    }
}

template <class Factor>
static void convolved(const float* x, const float* weights, const float* bias, float* y, i64 groups, const i64* ends,
                      i64 weights_stride, i64 bias_stride, const Shape& s, bool flipped) {
  const auto rows = classes(s.oh, s.h, s.kh, s.sh, s.ph, s.dh);
  const auto columns = classes(s.ow, s.w, s.kw, s.sw, s.pw, s.dw);
  const i64 taps = s.kh * s.kw, pixel = factors_of<Factor>(s.c);
  std::vector<Factor> packed(taps * pixel * s.oc);
  std::vector<i64> in, out;
  Room<Factor> room;
  const i64 together = std::max<i64>(1, 32768 / (s.h * s.w * s.c + s.oh * s.ow * s.oc));  // images that fit the L2 cache
  i64 row = 0;
  for (i64 g = 0; g < groups; g++) {
    const float* w = weights + g * weights_stride;
    for (i64 first = 0, size; first < s.oc; first += size) {  // packed: [block of outputs][tap][factor][output of the block]
      size = block_of(s.oc - first);
      for (i64 o = first; o < first + size; o++) {
        Factor* block = packed.data() + first * taps * pixel + (o - first);
        for (i64 i = 0; i < pixel; i++)
          for (i64 t = 0; t < taps; t++)
            block[(t * pixel + i) * size] = factor<Factor>(i, s.c, [&](i64 c) {
              return flipped ? w[(c * s.oc + o) * taps + taps - 1 - t] : w[(o * s.c + c) * taps + t];
            });
      }
    }
    for (; row < ends[g]; row += std::min(together, ends[g] - row)) {
      const i64 images = std::min(together, ends[g] - row);
      const Factor* xs = as_factors(x + row * s.h * s.w * s.c, images * s.h * s.w, s.c, room);
      for (i64 first = 0, size; first < s.oc; first += size) {
        size = block_of(s.oc - first);
        const Factor* block = packed.data() + first * taps * pixel;
        const float* b = bias ? bias + g * bias_stride + first : nullptr;
        float* ys = y + row * s.oh * s.ow * s.oc + first;
        with_block(size, [&](auto vector, auto v) {
          block_of_channels<decltype(vector), v>(s, pixel, xs, ys, block, b, rows, columns, images, in, out);
        });
      }
    }
  }
}

// y ← convolution of each group's rows with the group's weights [out][in][kh][kw] (output channels: a multiple of 8).
// With `flipped`, the weights are those of the convolution whose input gradient this is: [in][out][kh][kw], turned round.
// With `low`, products are of bfloat16.
extern "C" void convolve(const float* x, const float* weights, const float* bias, float* y, i64 groups, const i64* ends,
                         i64 weights_stride, i64 bias_stride, const Shape* shape, i64 flipped, i64 low) {
  const auto convolve = low ? convolved<Two> : convolved<float>;
  convolve(x, weights, bias, y, groups, ends, weights_stride, bias_stride, *shape, flipped);
}

// sums[C][V vectors] += Σ over a rectangle of output pixels of x[pixel seen][C] ⊗ dy[pixel][V vectors]; with two
// factors at a time, of every other one, as its neighbour comes with it
template <class T, int C, int V, class Factor>
ALWAYS void outer(const Shape& s, const Factor* x, const Factor* dy, float* sums, i64 height, i64 width) {
  constexpr i64 N = lanes<T>, each = std::is_same_v<Factor, Two> ? 2 : 1;
  T sum[C][V];
  UNROLL for (int c = 0; c < C; c++) UNROLL for (int v = 0; v < V; v++) sum[c][v] = load<T>(sums + c * s.oc + N * v);
  const i64 x_step = each * s.sw * s.c, dy_step = each * s.oc;
  for (i64 i = 0; i < height; i++) {
    const Factor* xs = x + i * s.sh * s.w * s.c;
    const Factor* g = dy + i * s.ow * s.oc;
    for (i64 j = 0; j < width; j += each, xs += x_step, g += dy_step) {
      decltype(load_factors<T>(g)) gv[V];
      UNROLL for (int v = 0; v < V; v++) gv[v] = load_factors<T>(g + N * v);
      UNROLL for (int c = 0; c < C; c++) {
        const auto b = all_factors<T>(xs[c]);
        UNROLL for (int v = 0; v < V; v++) sum[c][v] = plus_product<T>(sum[c][v], b, gv[v]);
      }
    }
  }
  UNROLL for (int c = 0; c < C; c++) UNROLL for (int v = 0; v < V; v++) store<T>(sums + c * s.oc + N * v, sum[c][v]);
}

// An image as factors: a pixel's channels, each with that of the pixel `apart` from it if two are taken at a time. Beyond the
// right edge that is 0, so that a rectangle of odd width gets nothing from its neighbour on the right: one of the two factors
// is 0 there (and the other finite, or the client's gradient is not).
static const float* by_neighbours(const float* image, i64, i64, i64, i64, Room<float>&) { return image; }
static const Two* by_neighbours(const float* image, i64 height, i64 width, i64 channels, i64 apart, Room<Two>& room) {
  Two* to = room.make(height * width * channels);
  const i64 both = std::max<i64>(0, width - apart) * channels, row = width * channels;
  for (i64 y = 0; y < height; y++, image += row, to += row) {
    lower_rows(image, image + apart * channels, both, to);
    lower_rows(image + both, nullptr, row - both, to + both);
  }
  return room.get();
}

template <class Factor>
static void weights_gradient(const float* images, const float* gradients, float* gradient, i64 clients, const i64* ends,
                             const i64* places, i64 gradient_stride, bool beta, const Shape& s) {
  const i64 taps = s.kh * s.kw;
  std::vector<float> sums(taps * s.c * s.oc);
  Room<Factor> x_room, dy_room;
  // as many output rows at a time as fit the L1 cache with the input rows they see
  const i64 band = std::max<i64>(1, 5000 / (s.ow * 16 + s.sh * s.w * s.c));
  const bool few = s.c <= 3 && W == 8 && s.oc % 32 == 0;  // few input channels: more output channels at a time
  i64 row = 0;
  for (i64 client = 0; client < clients; client++) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (; row < ends[client]; row++) {
      const Factor* x = by_neighbours(images + row * s.h * s.w * s.c, s.h, s.w, s.c, s.sw, x_room);
      const Factor* dy = by_neighbours(gradients + row * s.oh * s.ow * s.oc, s.oh, s.ow, s.oc, 1, dy_room);
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
              const Factor* xs = x + ((y0 * s.sh + dy0) * s.w + x0 * s.sw + dx0) * s.c;
              const Factor* g = dy + (y0 * s.ow + x0) * s.oc + o;
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
    }
    float* to = gradient + places[client] * gradient_stride;
    for (i64 o = 0; o < s.oc; o++)
      for (i64 c = 0; c < s.c; c++)
        for (i64 t = 0; t < taps; t++, to++) *to = (beta ? *to : 0.0f) + sums[(t * s.c + c) * s.oc + o];
  }
}

// gradient[place of client] ← β gradient[…] + that of the client's rows, as [out][in][kh][kw] (output channels: a multiple of 8)
extern "C" void convolution_weights(const float* x, const float* dy, float* gradient, i64 clients, const i64* ends,
                                    const i64* places, i64 gradient_stride, i64 beta, const Shape* shape, i64 low) {
  const auto weights = low ? weights_gradient<Two> : weights_gradient<float>;
  weights(x, dy, gradient, clients, ends, places, gradient_stride, beta, *shape);
}
