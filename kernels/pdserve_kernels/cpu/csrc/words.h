// Vectors of 16 words of 32 bits, their bits as numbers, and comparisons as masks of 16 bits.
#pragma once

#include "isa.h"

namespace pds {

using Words = Pairs;

// The 64-bit products of 16 pairs of words.
struct Products {
  Words low, high;
};

#if defined(__AVX512BF16__)

PDS_INLINE Words set1_word(uint32_t x) { return _mm512_set1_epi32(static_cast<int32_t>(x)); }
PDS_INLINE Words load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
PDS_INLINE void store_words(uint32_t* p, Words x) { _mm512_storeu_si512(p, x); }
PDS_INLINE Words add(Words a, Words b) { return _mm512_add_epi32(a, b); }
PDS_INLINE Words sub(Words a, Words b) { return _mm512_sub_epi32(a, b); }
PDS_INLINE Words bit_xor(Words a, Words b) { return _mm512_xor_si512(a, b); }
template <int COUNT>
PDS_INLINE Words shift_left(Words x) {
  return _mm512_slli_epi32(x, COUNT);
}
// As signed numbers: copies of the sign come in.
template <int COUNT>
PDS_INLINE Words shift_right_signed(Words x) {
  return _mm512_srai_epi32(x, COUNT);
}
PDS_INLINE Products multiply(Words a, Words b) {
  Words even = _mm512_mul_epu32(a, b);
  Words odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
  return {_mm512_mullo_epi32(a, b),
          _mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_DDBB)};
}
PDS_INLINE Words as_words(F32 x) { return _mm512_castps_si512(x); }
PDS_INLINE F32 as_floats(Words x) { return _mm512_castsi512_ps(x); }
PDS_INLINE F32 signed_to_float(Words x) { return _mm512_cvtepi32_ps(x); }
PDS_INLINE F32 unsigned_to_float(Words x) { return _mm512_cvtepu32_ps(x); }
PDS_INLINE Words truncate_to_words(F32 x) { return _mm512_cvttps_epi32(x); }
PDS_INLINE Words unpack_low_32(Words a, Words b) { return _mm512_unpacklo_epi32(a, b); }
PDS_INLINE Words unpack_high_32(Words a, Words b) { return _mm512_unpackhi_epi32(a, b); }
PDS_INLINE Words unpack_low_64(Words a, Words b) { return _mm512_unpacklo_epi64(a, b); }
PDS_INLINE Words unpack_high_64(Words a, Words b) { return _mm512_unpackhi_epi64(a, b); }
// Comparisons with NaN are false.
PDS_INLINE uint32_t greater(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
PDS_INLINE uint32_t greater_equal(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
PDS_INLINE uint32_t is_nan(F32 x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
// a < b ? yes : no
PDS_INLINE F32 select_less(F32 a, F32 b, F32 yes, F32 no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
// Lane i is yes where bit i is set, else no.
PDS_INLINE F32 select_bits(uint32_t bits, F32 yes, F32 no) {
  return _mm512_mask_blend_ps(static_cast<__mmask16>(bits), no, yes);
}
// An exact sum of numbers in [0, 2^62), each rounded down.
class IntegerSum {
 public:
  PDS_INLINE void add(F32 x) {
    sums_ = _mm512_add_epi64(sums_, _mm512_cvttps_epi64(_mm512_castps512_ps256(x)));
    sums_ = _mm512_add_epi64(sums_, _mm512_cvttps_epi64(_mm512_extractf32x8_ps(x, 1)));
  }
  int64_t total() const { return _mm512_reduce_add_epi64(sums_); }

 private:
  __m512i sums_ = _mm512_setzero_si512();
};

#else

PDS_INLINE Words set1_word(uint32_t x) {
  __m256i all = _mm256_set1_epi32(static_cast<int32_t>(x));
  return {all, all};
}
PDS_INLINE Words load_words(const uint32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
PDS_INLINE void store_words(uint32_t* p, Words x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.high);
}
PDS_INLINE Words add(Words a, Words b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
PDS_INLINE Words sub(Words a, Words b) {
  return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)};
}
PDS_INLINE Words bit_xor(Words a, Words b) {
  return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)};
}
template <int COUNT>
PDS_INLINE Words shift_left(Words x) {
  return {_mm256_slli_epi32(x.low, COUNT), _mm256_slli_epi32(x.high, COUNT)};
}
template <int COUNT>
PDS_INLINE Words shift_right_signed(Words x) {
  return {_mm256_srai_epi32(x.low, COUNT), _mm256_srai_epi32(x.high, COUNT)};
}
PDS_INLINE __m256i multiply_high(__m256i a, __m256i b) {
  __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(a, b), 32);
  __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
  return _mm256_blend_epi32(even, odd, 0xaa);
}
PDS_INLINE Products multiply(Words a, Words b) {
  return {{_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)},
          {multiply_high(a.low, b.low), multiply_high(a.high, b.high)}};
}
PDS_INLINE Words as_words(F32 x) {
  return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)};
}
PDS_INLINE F32 as_floats(Words x) {
  return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)};
}
PDS_INLINE F32 signed_to_float(Words x) {
  return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)};
}
// Both halves of a word are exact, so that only their sum is rounded.
PDS_INLINE __m256 unsigned_to_float(__m256i x) {
  __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 16));
  __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(0xffff)));
  return _mm256_fmadd_ps(high, _mm256_set1_ps(65536.0f), low);
}
PDS_INLINE F32 unsigned_to_float(Words x) {
  return {unsigned_to_float(x.low), unsigned_to_float(x.high)};
}
PDS_INLINE Words truncate_to_words(F32 x) {
  return {_mm256_cvttps_epi32(x.low), _mm256_cvttps_epi32(x.high)};
}
PDS_INLINE Words unpack_low_32(Words a, Words b) {
  return {_mm256_unpacklo_epi32(a.low, b.low), _mm256_unpacklo_epi32(a.high, b.high)};
}
PDS_INLINE Words unpack_high_32(Words a, Words b) {
  return {_mm256_unpackhi_epi32(a.low, b.low), _mm256_unpackhi_epi32(a.high, b.high)};
}
PDS_INLINE Words unpack_low_64(Words a, Words b) {
  return {_mm256_unpacklo_epi64(a.low, b.low), _mm256_unpacklo_epi64(a.high, b.high)};
}
PDS_INLINE Words unpack_high_64(Words a, Words b) {
  return {_mm256_unpackhi_epi64(a.low, b.low), _mm256_unpackhi_epi64(a.high, b.high)};
}
template <int PREDICATE>
PDS_INLINE uint32_t compare(F32 a, F32 b) {
  int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, PREDICATE));
  int high = _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, PREDICATE));
  return static_cast<uint32_t>(low | high << 8);
}
// Comparisons with NaN are false.
PDS_INLINE uint32_t greater(F32 a, F32 b) { return compare<_CMP_GT_OQ>(a, b); }
PDS_INLINE uint32_t greater_equal(F32 a, F32 b) { return compare<_CMP_GE_OQ>(a, b); }
PDS_INLINE uint32_t is_nan(F32 x) { return compare<_CMP_UNORD_Q>(x, x); }
// a < b ? yes : no
PDS_INLINE F32 select_less(F32 a, F32 b, F32 yes, F32 no) {
  return {_mm256_blendv_ps(no.low, yes.low, _mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.high, yes.high, _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ))};
}
PDS_INLINE __m256 select_bits(uint32_t bits, __m256 yes, __m256 no) {
  const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int32_t>(bits)), lanes);
  return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lanes)));
}
// Lane i is yes where bit i is set, else no.
PDS_INLINE F32 select_bits(uint32_t bits, F32 yes, F32 no) {
  return {select_bits(bits, yes.low, no.low), select_bits(bits >> 8, yes.high, no.high)};
}
// An exact sum of numbers in [0, 2^62), each rounded down.
class IntegerSum {
 public:
  PDS_INLINE void add(F32 x) {
    float lanes[LANES];
    store(lanes, x);
    for (float lane : lanes) total_ += static_cast<int64_t>(lane);
  }
  int64_t total() const { return total_; }

 private:
  int64_t total_ = 0;
};

#endif

}  // namespace pds
