// Vectors of 32 small integers, and how they become pairs of bf16, exactly.
#pragma once

#include "isa.h"

namespace pds {

// The bf16 of small integers, to be looked up: entry(i) for i = 0 to 31, |entry(i)| <= 128.
struct SmallIntegers {
  alignas(64) bf16 bits[32] = {};

  template <typename Entry>
  constexpr explicit SmallIntegers(const Entry& entry) {
    for (int i = 0; i < 32; ++i) bits[i] = bits_of(entry(i));
  }
  static constexpr bf16 bits_of(int value) {
    if (value == 0) return 0;
    int mantissa = value < 0 ? -value : value, exponent = 127 + 7;
    for (; mantissa < 128; mantissa *= 2) --exponent;
    return static_cast<bf16>((value < 0) << 15 | exponent << 7 | (mantissa & 127));
  }
};

#if defined(__AVX512BF16__)

// Signed, of 16 bits, in the order of the bf16 in Pairs.
struct Shorts {
  __m512i all;
};

PDS_INLINE Shorts load_shorts(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
PDS_INLINE Shorts shorts_of_int8(const uint8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
PDS_INLINE Shorts sub(Shorts a, Shorts b) { return {_mm512_sub_epi16(a.all, b.all)}; }
// The N-th 4 bits of each, 0 to 15.
template <int N>
PDS_INLINE Shorts nibbles(Shorts x) {
  return {_mm512_and_si512(_mm512_srli_epi16(x.all, 4 * N), _mm512_set1_epi16(15))};
}
// For -256 to 256.
PDS_INLINE Pairs pairs_of(Shorts x) {
  __m512i low = _mm512_cvtepi16_epi32(_mm512_castsi512_si256(x.all));
  __m512i high = _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(x.all, 1));
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
}
// The same for -16 to 15, faster.
PDS_INLINE Pairs pairs_of_small(Shorts x) {
  static constexpr SmallIntegers table([](int i) { return i < 16 ? i : i - 32; });
  return _mm512_permutexvar_epi16(x.all, load_pairs(table.bits));
}
// The N-th 4 bits of each, less 8. The lookup takes 5 bits: every entry is there twice.
template <int N>
PDS_INLINE Pairs pairs_of_nibbles(Shorts x) {
  static constexpr SmallIntegers table([](int i) { return i % 16 - 8; });
  return _mm512_permutexvar_epi16(_mm512_srli_epi16(x.all, 4 * N), load_pairs(table.bits));
}
PDS_INLINE Pairs pairs_of_int8(const uint8_t* p) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(p);
  __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128(halves));
  __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128(halves + 1));
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
}

#else

struct Shorts {
  __m256i low, high;
};

PDS_INLINE Shorts load_shorts(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
PDS_INLINE Shorts shorts_of_int8(const uint8_t* p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}
PDS_INLINE Shorts sub(Shorts a, Shorts b) {
  return {_mm256_sub_epi16(a.low, b.low), _mm256_sub_epi16(a.high, b.high)};
}
template <int N>
PDS_INLINE Shorts nibbles(Shorts x) {
  const __m256i mask = _mm256_set1_epi16(15);
  return {_mm256_and_si256(_mm256_srli_epi16(x.low, 4 * N), mask),
          _mm256_and_si256(_mm256_srli_epi16(x.high, 4 * N), mask)};
}
PDS_INLINE __m256i bf16_of(__m256i x) {
  __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(x)));
  __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_extracti128_si256(x, 1)));
  __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(_mm256_castps_si256(low), 16),
                                       _mm256_srli_epi32(_mm256_castps_si256(high), 16));
  return _mm256_permute4x64_epi64(packed, 0xd8);  // packus works within 128-bit halves
}
PDS_INLINE Pairs pairs_of(Shorts x) { return {bf16_of(x.low), bf16_of(x.high)}; }
PDS_INLINE Pairs pairs_of_small(Shorts x) { return pairs_of(x); }
template <int N>
PDS_INLINE Pairs pairs_of_nibbles(Shorts x) {
  const __m256i eight = _mm256_set1_epi16(8);
  return pairs_of(sub(nibbles<N>(x), {eight, eight}));
}
PDS_INLINE Pairs pairs_of_int8(const uint8_t* p) { return pairs_of(shorts_of_int8(p)); }

#endif

}  // namespace pds
