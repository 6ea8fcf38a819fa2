// The sum of squares of a vector in double precision, in 32 lanes; see norm.py, whose numpy twin adds in the same order.

#include <algorithm>
#include <cstdint>

using i64 = std::int64_t;
static const i64 LANES = 32, ROWS = 512;

template <class T> static double squares(const T* __restrict x, i64 n) {
    double total[LANES] = {};
    const i64 whole = n / LANES * LANES;
    for (i64 at = 0; at < whole; at += LANES * ROWS) {
        double lanes[LANES] = {};
        const i64 end = std::min(at + LANES * ROWS, whole);
        for (i64 i = at; i < end; i += LANES)
            for (i64 j = 0; j < LANES; j++) lanes[j] += double(x[i + j]) * double(x[i + j]);
        for (i64 j = 0; j < LANES; j++) total[j] += lanes[j];
    }
    for (i64 i = whole; i < n; i++) total[i - whole] += double(x[i]) * double(x[i]);
    for (i64 half = LANES / 2; half; half /= 2)
        for (i64 j = 0; j < half; j++) total[j] += total[half + j];
    return total[0];
}

extern "C" {

double squares_of_floats(const float* x, i64 n) { return squares(x, n); }

double squares_of_doubles(const double* x, i64 n) { return squares(x, n); }
}
