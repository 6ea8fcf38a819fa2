// One step of a buffered linear Toeplitz matrix's inverse; see toeplitz.py, whose numpy twin does the same operations in the same order.

#include <algorithm>
#include <cstdint>

using i64 = std::int64_t;

extern "C" {

// x ← x − Σ_j weight_j buffer_j, then buffer_j ← decay_j buffer_j + x, then x ← scale x; a block that stays in the cache at a time
void toeplitz(double* __restrict x, i64 n, double* const* buffers, const double* weight, const double* decay, i64 count,
              double scale) {
    const i64 block = 512;
    for (i64 at = 0; at < n; at += block) {
        const i64 end = std::min(at + block, n);
        for (i64 j = 0; j < count; j++) {
            const double* __restrict b = buffers[j];
            for (i64 i = at; i < end; i++) x[i] -= weight[j] * b[i];
        }
        for (i64 j = 0; j < count; j++) {
            double* __restrict b = buffers[j];
            for (i64 i = at; i < end; i++) b[i] = b[i] * decay[j] + x[i];
        }
        for (i64 i = at; i < end; i++) x[i] *= scale;
    }
}
}
