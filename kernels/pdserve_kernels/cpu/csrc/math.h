// Functions of one number, 16 at a time.
#pragma once

#include "isa.h"

namespace pds {

// exp(x), to about 1e-7 relative; 0 for -inf, inf from 89 on, NaN for NaN.
//
// exp(x) = 2^n * exp(r) with |r| <= ln(2) / 2, and Moshier's polynomial for exp(r) (Cephes, expf.c).
PDS_INLINE F32 exp(F32 x) {
  // Beyond these the result is 0 or inf anyway. A NaN passes: it is the second operand.
  x = min(set1(89.0f), max(set1(-104.0f), x));
  F32 n = round_to_integer(mul(x, set1(1.44269504088896341f)));
  F32 r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F32 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(mul(p, r), r, r), set1(1.0f));
  return scale_by_power_of_2(p, n);
}

// 2^x for x <= 120, to 2e-7 relative; exactly 1 for 0, exactly 0 for -inf, NaN for NaN.
//
// 2^x = 2^n * 2^f with |f| <= 1/2; the polynomial has the least largest relative error (found by
// Lawson's iteration) of those of its degree that are 1 at 0.
PDS_INLINE F32 exp2(F32 x) {
  x = max(set1(-200.0f), x);  // 0 anyway. A NaN passes: it is the second operand.
  F32 n = round_to_integer(x), f = sub(x, n);
  F32 p = set1(1.326472731e-3f);
  p = fma(p, f, set1(9.671512991e-3f));
  p = fma(p, f, set1(5.550733581e-2f));
  p = fma(p, f, set1(2.402224243e-1f));
  p = fma(p, f, set1(6.931470037e-1f));
  p = fma(p, f, set1(1.0f));
  return scale_by_power_of_2(p, n);
}

PDS_INLINE F32 rounded_to_bf16(F32 x) {
  bf16 bits[LANES];
  store_bf16(bits, x);
  return load_bf16(bits);
}

// x * sigmoid(x)
PDS_INLINE F32 silu(F32 x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

}  // namespace pds
