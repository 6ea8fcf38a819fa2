// Normal numbers from uniform bits, by Box and Muller; see normals.py, whose numpy twin does the same operations in the same order.

#include <cstdint>
#include <cmath>
#include <cstring>

using u64 = std::uint64_t;

static inline double as_double(u64 bits) {
    double x;
    std::memcpy(&x, &bits, 8);
    return x;
}

static inline u64 as_bits(double x) {
    u64 bits;
    std::memcpy(&bits, &x, 8);
    return bits;
}

// (2k + 1) / 2^53 for a k of 52 bits: in (0, 1), never at its ends
static inline double unit(u64 bits) { return as_double(bits >> 12 | 0x3FF0000000000000u) - 1.0 + 0x1p-53; }

extern "C" {

// radius[i] from bits[i] and angle[i] from bits[pairs + i]: out[i] = radius cos, out[pairs + i] = radius sin
void normals(const u64* __restrict bits, std::int64_t pairs, double* __restrict out) {
    for (std::int64_t i = 0; i < pairs; i++) {
        // log u = k ln 2 + log m, with m from √½ to √2; the polynomial is fdlibm's
        const u64 u = as_bits(unit(bits[i]));
        const u64 k = (u - 0x3FE6A09E667F3BCDu + (u64(64) << 52)) >> 52;
        const double e = as_double(k | 0x4330000000000000u) - (0x1p52 + 64.0);
        const double f = as_double(u - (k << 52) + (u64(64) << 52)) - 1.0;
        const double s = f / (2.0 + f), z = s * s, h = 0.5 * f * f;
        double p = 1.479819860511658591e-01;
        p = p * z + 1.531383769920937332e-01;
        p = p * z + 1.818357216161805012e-01;
        p = p * z + 2.222219843214978396e-01;
        p = p * z + 2.857142874366239149e-01;
        p = p * z + 3.999999999940941908e-01;
        p = p * z + 6.666666666666735130e-01;
        const double log = e * 6.93147180369123816490e-01 - (h - (s * (h + p * z) + e * 1.90821492927058770002e-10) - f);
        const double radius = std::sqrt(-2.0 * log);

        // the turn v is q quarters and r, at most an eighth; the polynomials are fdlibm's
        const double v = unit(bits[pairs + i]);
        const double shifted = v * 4.0 + 0x1.8p52;  // rounds to an integer, which is then in its lowest bits
        const u64 q = as_bits(shifted);
        const double r = v - (shifted - 0x1.8p52) * 0.25, x = r * 6.283185307179586477, y = x * x;
        double a = 1.58969099521155010221e-10;
        a = a * y + -2.50507602534068634195e-08;
        a = a * y + 2.75573137070700676789e-06;
        a = a * y + -1.98412698298579493134e-04;
        a = a * y + 8.33333333332248946124e-03;
        a = a * y + -1.66666666666666324348e-01;
        const double sine = x + x * (y * a);
        double b = -1.13596475577881948265e-11;
        b = b * y + 2.08757232129817482790e-09;
        b = b * y + -2.75573143513906633035e-07;
        b = b * y + 2.48015872894767294178e-05;
        b = b * y + -1.38888888888741095749e-03;
        b = b * y + 4.16666666666666019037e-02;
        const double cosine = 1.0 - (0.5 * y - y * (y * b));
        const u64 odd = 0 - (q & 1);  // quarters 1 and 3 exchange them, and two of four change sign
        const u64 c = (as_bits(cosine) & ~odd) | (as_bits(sine) & odd);
        const u64 d = (as_bits(sine) & ~odd) | (as_bits(cosine) & odd);
        out[i] = radius * as_double(c ^ (((q + 1) >> 1 & 1) << 63));
        out[pairs + i] = radius * as_double(d ^ ((q >> 1 & 1) << 63));
    }
}
}
