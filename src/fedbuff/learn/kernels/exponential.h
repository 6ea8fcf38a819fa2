// e^x of vectors, to an ulp or two.

#pragma once

#include <cmath>

#include "vectors.h"

// e^(x − n ln 2) for n = the integer nearest to x / ln 2, by a polynomial
template <class T> ALWAYS T after_twos(T x, T n) {
  T r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  T p = all<T>(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * (r * r) + r + 1.0f;
}

// x = n ln 2 + r, a polynomial in r, n into the exponent; 0 below the normal numbers
ALWAYS v8 exponential(v8 x) {
  const v8 low = all(-87.3f), high = all(88.7f);
  const v8 clamped = x < low ? low : (x > high ? high : x);  // NaN stays
  const v8 magic = all(12582912.0f);                         // adding it rounds to an integer, left in the low bits
  const v8 shifted = clamped * 1.44269504f + magic;
  const v8 p = after_twos<narrow>(clamped, shifted - magic);
  const m8 power = ((m8)shifted - (m8)magic) << 23;
  const v8 y = (v8)((m8)p + power);
  const v8 above = x > high ? all(INFINITY) : y;
  return x < low ? all(0) : (x != x ? x : above);
}

// e^x between e^−87 and e^88, and NaN
template <class T> ALWAYS T bounded_exponential(T x) {
  const T low = all<T>(-87.0f), high = all<T>(88.0f), magic = all<T>(12582912.0f);
  x = low > x ? low : x;
  x = high < x ? high : x;
  const T shifted = x * 1.44269504f + magic;
  const T p = after_twos<T>(x, shifted - magic);
  return p * (T)(((integers<T>)shifted << 23) + 0x3f800000);  // a product, for NaN to stay
}

template <class T> ALWAYS T sigmoid(T x) { return 1.0f / (1.0f + bounded_exponential<T>(-x)); }

template <class T> ALWAYS T hyperbolic(T x) {  // tanh: a polynomial near 0, where 1 − 2/(e^2x + 1) would lose digits
  const T z = x * x;
  T p = all<T>(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z + -5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z + -3.33332819422e-1f;
  const T small = p * z * x + x;
  const T large = 1.0f - 2.0f / (bounded_exponential<T>(x + x) + 1.0f);
  return z < 0.390625f ? small : large;
}
