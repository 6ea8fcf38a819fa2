// The sum of a buffer's weighted updates, in one pass over them; see sums.py.

#include <algorithm>
#include <cmath>
#include <cstdint>

using i64 = std::int64_t;

// out ← Σ weight · row, each product and sum rounded, in the order of the rows, as numpy would; whether all of it is finite
template <class T>
static i64 sum_rows(const T* matrix, i64 stride, i64 count, const i64* rows, const double* weights, i64 columns, T* out) {
    // Short pieces of many rows: the memory answers to many at once, and forgets none. Rows were written long ago, and come
    // from afar, so each piece is asked for so many pieces before it is needed.
    const i64 AHEAD = 20, BLOCK = 128;
    i64 asked = 0, asked_at = 0;  // the piece to ask for next: of which row, and where in it
    const auto ask = [&] {
        const i64 size = std::min(BLOCK, columns - asked_at);
        for (i64 i = 0; i < size; i += 64 / sizeof(T)) __builtin_prefetch(matrix + rows[asked] * stride + asked_at + i);
        if (++asked == count) asked = 0, asked_at += BLOCK;
    };
    for (i64 piece = 0; count && piece < AHEAD; piece++) ask();
    bool finite = true;
    for (i64 at = 0; at < columns; at += BLOCK) {
        const i64 size = std::min(BLOCK, columns - at);
        T* __restrict sum = out + at;
        std::fill(sum, sum + size, T(0));
        for (i64 r = 0; r < count; r++) {
            ask();
            const T* __restrict row = matrix + rows[r] * stride + at;
            const T weight = T(weights[r]);
            for (i64 i = 0; i < size; i++) sum[i] += row[i] * weight;
        }
        T none = 0;  // NaN as soon as one of them is not finite
        for (i64 i = 0; i < size; i++) none += sum[i] * T(0);
        finite &= none == 0;
    }
    return finite;
}

extern "C" {

i64 sum_floats(const float* matrix, i64 stride, i64 count, const i64* rows, const double* weights, i64 columns, float* out) {
    return sum_rows(matrix, stride, count, rows, weights, columns, out);
}

i64 sum_doubles(const double* matrix, i64 stride, i64 count, const i64* rows, const double* weights, i64 columns, double* out) {
    return sum_rows(matrix, stride, count, rows, weights, columns, out);
}
}
