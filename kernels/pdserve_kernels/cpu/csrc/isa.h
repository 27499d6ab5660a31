// One vocabulary of vectors for every instruction set the kernels are compiled for.
//
// A vector has 16 fp32 lanes everywhere (two registers on AVX2), so that packed layouts are the same
// on every machine. `Pairs` holds 16 pairs of bf16; `dot_pairs` adds a pair's two products to a lane.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define PDS_INLINE inline __attribute__((always_inline))

namespace pds {

// The bits of a bf16. Arithmetic is done in fp32, or on pairs.
using bf16 = uint16_t;

constexpr int LANES = 16;

PDS_INLINE float to_float(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

#if defined(__AVX512BF16__)

using F32 = __m512;
using Pairs = __m512i;
constexpr int NUM_REGISTERS = 32;  // how many F32 fit in the register file

PDS_INLINE F32 zero() { return _mm512_setzero_ps(); }
PDS_INLINE F32 set1(float x) { return _mm512_set1_ps(x); }
PDS_INLINE F32 load(const float* p) { return _mm512_loadu_ps(p); }
PDS_INLINE void store(float* p, F32 x) { _mm512_storeu_ps(p, x); }
PDS_INLINE F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
PDS_INLINE F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
PDS_INLINE F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
PDS_INLINE F32 div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
PDS_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
PDS_INLINE F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
PDS_INLINE F32 min(F32 a, F32 b) { return _mm512_min_ps(a, b); }
// All lanes in one, halves first: lane i with lane i + 8, then those with i + 4, and so on.
PDS_INLINE float sum_lanes(F32 x) { return _mm512_reduce_add_ps(x); }
PDS_INLINE float max_lanes(F32 x) { return _mm512_reduce_max_ps(x); }
PDS_INLINE F32 load_bf16(const bf16* p) {
  __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
// Rounds to nearest, ties to even.
PDS_INLINE void store_bf16(bf16* p, F32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
}
PDS_INLINE F32 round_to_integer(F32 x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x * 2^n for an integral n in [-300, 250].
PDS_INLINE F32 scale_by_power_of_2(F32 x, F32 n) { return _mm512_scalef_ps(x, n); }
PDS_INLINE Pairs load_pairs(const bf16* p) { return _mm512_loadu_si512(p); }
// Both lanes of every pair come from the two bf16 at p.
PDS_INLINE Pairs broadcast_pair(const bf16* p) {
  int32_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return _mm512_set1_epi32(bits);
}
// acc[i] + a[2i] * b[2i] + a[2i + 1] * b[2i + 1]
PDS_INLINE F32 dot_pairs(F32 acc, Pairs a, Pairs b) {
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}
// 32 numbers rounded to nearest, ties to even: pair i is numbers 2i and 2i + 1 of low, then of high.
PDS_INLINE Pairs round_to_pairs(F32 low, F32 high) {
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}
PDS_INLINE void store_pairs(bf16* p, Pairs x) { _mm512_storeu_si512(p, x); }

#elif defined(__AVX2__) && defined(__FMA__)

struct F32 {
  __m256 low, high;
};
struct Pairs {
  __m256i low, high;
};
constexpr int NUM_REGISTERS = 8;

PDS_INLINE F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
PDS_INLINE F32 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PDS_INLINE F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PDS_INLINE void store(float* p, F32 x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
PDS_INLINE F32 add(F32 a, F32 b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
PDS_INLINE F32 sub(F32 a, F32 b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
PDS_INLINE F32 mul(F32 a, F32 b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
PDS_INLINE F32 div(F32 a, F32 b) {
  return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
PDS_INLINE F32 fma(F32 a, F32 b, F32 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
PDS_INLINE F32 max(F32 a, F32 b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
PDS_INLINE F32 min(F32 a, F32 b) {
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
// All lanes in one, halves first: lane i with lane i + 8, then those with i + 4, and so on.
template <typename Combine>
PDS_INLINE float reduce_lanes(__m256 x, const Combine& combine) {
  __m128 four = combine(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  __m128 two = combine(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(combine(two, _mm_movehdup_ps(two)));
}
PDS_INLINE float sum_lanes(F32 x) {
  return reduce_lanes(_mm256_add_ps(x.low, x.high),
                      [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
}
PDS_INLINE float max_lanes(F32 x) {
  return reduce_lanes(_mm256_max_ps(x.low, x.high),
                      [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
}
PDS_INLINE F32 load_bf16(const bf16* p) {
  __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}
// The upper halves, rounded to nearest, ties to even; NaN stays NaN.
PDS_INLINE __m256i round_to_bf16(__m256 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i bias = _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
  __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
}
PDS_INLINE void store_bf16(bf16* p, F32 x) {
  __m256i packed = _mm256_packus_epi32(round_to_bf16(x.low), round_to_bf16(x.high));
  packed = _mm256_permute4x64_epi64(packed, 0xd8);  // packus works within 128-bit halves
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}
PDS_INLINE F32 round_to_integer(F32 x) {
  constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, NEAREST), _mm256_round_ps(x.high, NEAREST)};
}
PDS_INLINE __m256 power_of_2(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
// x * 2^n for an integral n in [-300, 250]; in two steps, since 2^n alone may be no normal number.
PDS_INLINE __m256 scale_by_power_of_2(__m256 x, __m256 n) {
  __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
  __m256 once = _mm256_mul_ps(x, power_of_2(half));
  return _mm256_mul_ps(once, power_of_2(_mm256_sub_epi32(whole, half)));
}
PDS_INLINE F32 scale_by_power_of_2(F32 x, F32 n) {
  return {scale_by_power_of_2(x.low, n.low), scale_by_power_of_2(x.high, n.high)};
}
PDS_INLINE Pairs load_pairs(const bf16* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + LANES))};
}
PDS_INLINE Pairs broadcast_pair(const bf16* p) {
  int32_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return {_mm256_set1_epi32(bits), _mm256_set1_epi32(bits)};
}
PDS_INLINE __m256 dot_pairs(__m256 acc, __m256i a, __m256i b) {
  const __m256i upper = _mm256_set1_epi32(0xffff0000);
  __m256 a_odd = _mm256_castsi256_ps(_mm256_and_si256(a, upper));
  __m256 b_odd = _mm256_castsi256_ps(_mm256_and_si256(b, upper));
  __m256 a_even = _mm256_castsi256_ps(_mm256_slli_epi32(a, 16));
  __m256 b_even = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
  return _mm256_fmadd_ps(a_even, b_even, _mm256_fmadd_ps(a_odd, b_odd, acc));
}
PDS_INLINE F32 dot_pairs(F32 acc, Pairs a, Pairs b) {
  return {dot_pairs(acc.low, a.low, b.low), dot_pairs(acc.high, a.high, b.high)};
}
// 32 numbers rounded to nearest, ties to even: pair i is numbers 2i and 2i + 1 of low, then of high.
PDS_INLINE __m256i round_to_pairs(F32 x) {
  __m256i packed = _mm256_packus_epi32(round_to_bf16(x.low), round_to_bf16(x.high));
  return _mm256_permute4x64_epi64(packed, 0xd8);  // packus works within 128-bit halves
}
PDS_INLINE Pairs round_to_pairs(F32 low, F32 high) {
  return {round_to_pairs(low), round_to_pairs(high)};
}
PDS_INLINE void store_pairs(bf16* p, Pairs x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + LANES), x.high);
}

#else
#error "compile with -mavx512bf16 (and the AVX-512 extensions under it) or with -mavx2 -mfma"
#endif

// The first `count` lanes, at most all; the others are 0, and not touched in memory.
PDS_INLINE F32 load(const float* p, int64_t count) {
  if (count >= LANES) return load(p);
  float lanes[LANES] = {};
  std::memcpy(lanes, p, static_cast<size_t>(count) * sizeof *p);
  return load(lanes);
}
PDS_INLINE F32 load_bf16(const bf16* p, int64_t count) {
  if (count >= LANES) return load_bf16(p);
  bf16 lanes[LANES] = {};
  std::memcpy(lanes, p, static_cast<size_t>(count) * sizeof *p);
  return load_bf16(lanes);
}
PDS_INLINE void store_bf16(bf16* p, F32 x, int64_t count) {
  if (count >= LANES) return store_bf16(p, x);
  bf16 lanes[LANES];
  store_bf16(lanes, x);
  std::memcpy(p, lanes, static_cast<size_t>(count) * sizeof *p);
}

}  // namespace pds
