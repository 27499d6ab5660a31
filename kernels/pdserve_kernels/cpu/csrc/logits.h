// Rows of logits, masked and divided as they are read, a block of tokens at a time.
#pragma once

#include <algorithm>
#include <limits>

#include "linear.h"
#include "words.h"

namespace pds {

constexpr float INFINITE = std::numeric_limits<float>::infinity();

// Logits [num_rows, vocab_size], rows `stride` apart.
template <typename Logit>
struct Logits {
  const Logit* data;
  int64_t num_rows, vocab_size, stride;

  const Logit* row(int64_t index) const { return data + index * stride; }
};

// Which tokens of a row may be chosen: bit i of word w is token 32 w + i.
struct AllowedTokens {
  const uint32_t* words;  // null: all
  int64_t vocab_size;

  // The bits of the 64 tokens from `start` on, a multiple of 64; those past the end mean nothing.
  uint64_t bits(int64_t start) const {
    if (words == nullptr) return ~uint64_t{0};
    const uint64_t high = start + 32 < vocab_size ? words[start / 32 + 1] : 0;
    return words[start / 32] | high << 32;
  }
};

// [num_rows, ceil(vocab_size / 32)], or null: all tokens of all rows.
struct Mask {
  const uint32_t* words;
  int64_t vocab_size;

  AllowedTokens row(int64_t index) const {
    const int64_t num_words = (vocab_size + 31) / 32;
    return {words == nullptr ? nullptr : words + index * num_words, vocab_size};
  }
};

namespace detail {

constexpr int BLOCK_VECTORS = 4;
constexpr int64_t BLOCK = BLOCK_VECTORS * LANES;  // tokens looked at together: 16 Philox counters

PDS_INLINE F32 load_logits(const float* p) { return load(p); }
PDS_INLINE F32 load_logits(const bf16* p) { return load_bf16(p); }
PDS_INLINE float to_float(float x) { return x; }
PDS_INLINE float to_float(bf16 x) { return pds::to_float(x); }

struct Block {
  F32 x[BLOCK_VECTORS];

  // The logits from `start` on; -inf past the end.
  template <typename Logit>
  PDS_INLINE Block(const Logit* row, int64_t start, int64_t end) {
    if (end - start >= BLOCK) {
      for (int v = 0; v < BLOCK_VECTORS; ++v) x[v] = load_logits(row + start + v * LANES);
    } else {
      float padded[BLOCK];
      for (int64_t i = 0; i < BLOCK; ++i)
        padded[i] = start + i < end ? to_float(row[start + i]) : -INFINITE;
      for (int v = 0; v < BLOCK_VECTORS; ++v) x[v] = load(padded + v * LANES);
    }
  }
  PDS_INLINE F32 highest() const { return max(max(x[0], x[1]), max(x[2], x[3])); }

  // -inf where no bit is set.
  PDS_INLINE void keep(uint64_t bits) {
    if (bits == ~uint64_t{0}) return;
    for (int v = 0; v < BLOCK_VECTORS; ++v)
      x[v] = select_bits(static_cast<uint32_t>(bits >> (v * LANES)), x[v], set1(-INFINITE));
  }
};
static_assert(BLOCK == 64 && PANEL == BLOCK, "a block's mask is one word of 64 bits");

// One request's logits, and which of its tokens are allowed: the others count as -inf, and blocks
// of them are not read.
template <typename Logit>
struct Row {
  const Logit* logits;
  AllowedTokens allowed;

  int64_t vocab_size() const { return allowed.vocab_size; }
  // Calls body(start, block) for the blocks of the tokens `ids`, from a multiple of BLOCK on.
  template <typename Body>
  PDS_INLINE void for_each_block(Range ids, const Body& body) const {
    for (int64_t start = ids.begin; start < ids.end; start += BLOCK) {
      const uint64_t bits = allowed.bits(start);
      if (bits == 0) continue;
      Block block(logits, start, ids.end);
      block.keep(bits);
      body(start, block);
    }
  }
};

// The same, divided by the request's temperature as they are read.
template <typename Logit>
struct ScaledRow {
  Row<Logit> row;
  float divisor;

  int64_t vocab_size() const { return row.vocab_size(); }
  template <typename Body>
  PDS_INLINE void for_each_block(Range ids, const Body& body) const {
    row.for_each_block(ids, [&](int64_t start, Block& block) __attribute__((always_inline)) {
      for (F32& x : block.x) x = div(x, set1(divisor));
      body(start, block);
    });
  }
  template <typename Body>
  PDS_INLINE void for_each_vector(const Body& body) const {
    for_each_block({0, vocab_size()}, [&](int64_t, const Block& block)
                                          __attribute__((always_inline)) {
      for (const F32& x : block.x) body(x);
    });
  }
  // The highest scaled logit: rounding keeps the order, so that one division does. None is higher
  // even in a row with NaN, which gives way as the first operand.
  float find_highest() const {
    F32 highest = set1(-INFINITE);
    row.for_each_block({0, vocab_size()}, [&](int64_t, const Block& block)
                                              __attribute__((always_inline)) {
      for (const F32& x : block.x) highest = max(x, highest);
    });
    float lanes[LANES];
    store(lanes, highest);
    return *std::max_element(lanes, lanes + LANES) / divisor;
  }
};

}  // namespace detail

}  // namespace pds
