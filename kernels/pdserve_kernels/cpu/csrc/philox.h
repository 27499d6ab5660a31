// Philox4x32-10 (Salmon et al., SC 2011), 16 counters at a time.
#pragma once

#include "words.h"

namespace pds {

class Philox {
 public:
  // The words of counters (c, position, 0, 0) under the key `seed`.
  Philox(uint64_t seed, uint64_t position)
      : key_{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
        position_(static_cast<uint32_t>(position)) {}

  // The four words of each of 16 counters from `first` on, in order: first the first counter's.
  PDS_INLINE void draw(uint32_t first, Words (&words)[4]) const {
    // Lane 4 i + j has counter 4 j + i, so that interleaving the words puts them in order.
    alignas(64) static constexpr uint32_t LANE_COUNTERS[LANES] = {0, 4, 8,  12, 1, 5, 9,  13,
                                                                  2, 6, 10, 14, 3, 7, 11, 15};
    Words c[4] = {add(load_words(LANE_COUNTERS), set1_word(first)), set1_word(position_),
                  set1_word(0), set1_word(0)};
    uint32_t key[2] = {key_[0], key_[1]};
    for (int round = 0; round < NUM_ROUNDS; ++round) {
      Products p0 = multiply(c[0], set1_word(0xd2511f53));
      Products p1 = multiply(c[2], set1_word(0xcd9e8d57));
      c[0] = bit_xor(bit_xor(p1.high, c[1]), set1_word(key[0]));
      c[2] = bit_xor(bit_xor(p0.high, c[3]), set1_word(key[1]));
      c[1] = p1.low;
      c[3] = p0.low;
      key[0] += 0x9e3779b9;
      key[1] += 0xbb67ae85;
    }
    Words low_01 = unpack_low_32(c[0], c[1]), low_23 = unpack_low_32(c[2], c[3]);
    Words high_01 = unpack_high_32(c[0], c[1]), high_23 = unpack_high_32(c[2], c[3]);
    words[0] = unpack_low_64(low_01, low_23);
    words[1] = unpack_high_64(low_01, low_23);
    words[2] = unpack_low_64(high_01, high_23);
    words[3] = unpack_high_64(high_01, high_23);
  }

 private:
  static constexpr int NUM_ROUNDS = 10;
  uint32_t key_[2];
  uint32_t position_;
};

}  // namespace pds
