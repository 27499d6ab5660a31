// What a processor can do at most, for benchmarks to compare kernels with. Needs AVX512-BF16.
#include <immintrin.h>

#include <cstdint>

// Reads [data, data + num_bytes) once and in order, each thread its own part.
extern "C" uint64_t read_bytes(const char* data, int64_t num_bytes) {
  uint64_t sum = 0;
#pragma omp parallel reduction(+ : sum)
  {
    __m512i sums[4] = {};
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num_bytes / 256; ++i)
      for (int j = 0; j < 4; ++j)
        sums[j] = _mm512_add_epi64(sums[j], _mm512_loadu_si512(data + i * 256 + j * 64));
    for (__m512i part : sums) sum += _mm512_reduce_add_epi64(part);
  }
  return sum;
}

// Has every thread multiply and add 16 * 16 * count pairs of bf16 in registers, 4 operations each.
extern "C" void dot_pairs(int64_t count) {
#pragma omp parallel
  {
    __m512 sums[16] = {};
    __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    for (int64_t i = 0; i < count; ++i)
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) {
        sums[j] = _mm512_dpbf16_ps(sums[j], ones, ones);
        asm volatile("" : "+v"(sums[j]));  // all of them are wanted
      }
  }
}
