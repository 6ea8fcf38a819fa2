// e^x of vectors, to an ulp or two.

#pragma once

#include <cmath>

#include "vectors.h"

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
