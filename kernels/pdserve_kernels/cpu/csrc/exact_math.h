// exp and log whose bits are those of pdserve_kernels/exact_math.py: the same operations in the
// same order, none of them fused. Coefficients and ranges are explained there.
#pragma once

#include "words.h"

namespace pds::exact {

constexpr int MANTISSA_BITS = 23;
constexpr uint32_t SQRT_HALF_BITS = 0x3f3504f3;
constexpr float SQRT_HALF = 0x1.6a09e6p-1f;  // of these bits
constexpr float LN_2 = 0.6931471805599453f;
constexpr float LOG_COEFFICIENTS[] = {
    -0.07636317610740662f, 0.12763658165931702f, -0.13160501420497894f, 0.14201503992080688f,
    -0.16623300313949585f, 0.20001235604286194f, -0.250008225440979f,   0.3333333134651184f};
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2_HIGH = 0.693359375f;
constexpr float LN_2_LOW = -2.12194440e-4f;
constexpr float EXP_COEFFICIENTS[] = {0.001381455920636654f, 0.008368735201656818f,
                                      0.04166838899254799f, 0.1666652113199234f,
                                      0.4999999403953552f};
constexpr float FIXED_POINT_BITS = 40.0f;
constexpr float LOWEST_EXPONENT = -30.0f;

template <int COUNT>
PDS_INLINE F32 evaluate(const float (&coefficients)[COUNT], F32 x) {
  F32 result = set1(coefficients[0]);
  for (int i = 1; i < COUNT; ++i) result = add(mul(result, x), set1(coefficients[i]));
  return result;
}

PDS_INLINE F32 log1p(F32 f) {
  F32 square = mul(f, f);
  F32 series = mul(mul(evaluate(LOG_COEFFICIENTS, f), f), square);
  return add(sub(series, mul(square, set1(0.5f))), f);
}

// x = 2^exponent * (1 + fraction)
struct Split {
  F32 exponent, fraction;

  PDS_INLINE explicit Split(F32 x) {
    Words bits = as_words(x);
    Words power = shift_right_signed<MANTISSA_BITS>(sub(bits, set1_word(SQRT_HALF_BITS)));
    exponent = signed_to_float(power);
    fraction = sub(as_floats(sub(bits, shift_left<MANTISSA_BITS>(power))), set1(1.0f));
  }
};

PDS_INLINE F32 log(F32 x) {
  Split split(x);
  return add(log1p(split.fraction), mul(split.exponent, set1(LN_2)));
}

PDS_INLINE F32 log_of_complement(F32 u) {
  F32 complement = sub(set1(1.0f), u);
  Split split(complement);
  F32 fraction = select_less(complement, set1(SQRT_HALF), split.fraction, sub(zero(), u));
  return add(log1p(fraction), mul(split.exponent, set1(LN_2)));
}

// exp of x <= 0 in fixed point, not yet rounded down to an integer.
PDS_INLINE F32 exp_to_fixed_point(F32 x) {
  x = max(x, set1(LOWEST_EXPONENT));
  F32 exponent = round_to_integer(mul(x, set1(LOG2_E)));
  F32 rest = sub(x, mul(exponent, set1(LN_2_HIGH)));
  rest = sub(rest, mul(exponent, set1(LN_2_LOW)));
  F32 series = mul(mul(evaluate(EXP_COEFFICIENTS, rest), rest), rest);
  series = add(add(series, rest), set1(1.0f));
  return scale_by_power_of_2(series, add(exponent, set1(FIXED_POINT_BITS)));
}

}  // namespace pds::exact
