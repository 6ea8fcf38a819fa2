// Linear layers with products of bfloat16, for groups of rows that see weights of their own. Torch's would round the sums too.

#include "products.h"

// y [row][out] = x [row][in] w + bias; w [group][in][out], or with `turned` [group][out][in]; bias [group][out] or null
extern "C" void low_linear(const float* x, const float* w, const float* bias, float* y, i64 groups, const i64* ends, i64 in,
                           i64 out, i64 w_stride, i64 bias_stride, i64 turned) {
  const i64 wide = filled(out);
  std::vector<Two> packed;
  std::vector<const float*> from;
  std::vector<float> start(wide);
  Room<float> room;
  for (i64 g = 0, first = 0; g < groups; first = ends[g++]) {
    const i64 rows = ends[g] - first;
    (turned ? pack_turned<Two> : pack<Two>)(packed, w + g * w_stride, in, out);
    from.clear();
    for (i64 r = first; r < ends[g]; r++) from.push_back(x + r * in);
    if (bias) std::copy_n(bias + g * bias_stride, out, start.begin());
    float* to = wide == out ? y + first * out : room.make(rows * wide);
    multiply(from.data(), rows, in, packed.data(), {start.data(), 0}, {to, wide}, wide);
    for (i64 r = 0; wide != out && r < rows; r++) std::copy_n(to + r * wide, out, y + (first + r) * out);
  }
}
