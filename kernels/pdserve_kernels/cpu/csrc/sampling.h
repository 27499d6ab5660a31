// Choosing tokens: argmax, and Gumbel-max over logits filtered by min-p, top-k and top-p, without
// a sort. What is chosen is defined by pdserve_kernels/reference/sampling.py, to the bit.
#pragma once

#include <limits>
#include <vector>

#include "exact_math.h"
#include "linear.h"
#include "philox.h"

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

// The best token so far, the first one among equals if they are offered in order.
struct Best {
  float value = -INFINITE;
  int64_t token_id = 0;

  void offer(float other_value, int64_t other_id) {
    if (other_value > value) *this = {other_value, other_id};
  }
};

// What the requests ask for; all arrays are [num_rows].
struct SamplingRequests {
  const float* temperature;  // 0 is greedy
  const float* divisor;      // of a random row's logits
  const int64_t* top_k;      // 0, or the vocabulary's size and above, is no limit
  const double* top_p;       // 1 is no limit
  const float* log_min_p;    // -inf is no limit
  const int64_t* seeds;
  const int64_t* positions;
  int64_t first_id = 0;  // of the vocabulary, that the logits begin with; a multiple of 4

  bool is_random(int64_t row) const { return temperature[row] != 0.0f; }
  bool has_top_k(int64_t row, int64_t vocab_size) const {
    return top_k[row] > 0 && top_k[row] < vocab_size;
  }
  bool has_top_p(int64_t row) const { return top_p[row] < 1.0; }
  bool has_filter(int64_t row, int64_t vocab_size) const {
    return is_random(row) &&
           (has_top_k(row, vocab_size) || has_top_p(row) || log_min_p[row] > -INFINITE);
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

// Calls body with the indexes of the bits that are set.
template <typename Body>
PDS_INLINE void for_each_lane(uint32_t mask, const Body& body) {
  for (; mask != 0; mask &= mask - 1) body(__builtin_ctz(mask));
}

PDS_INLINE void offer(Best& best, int64_t first_id, F32 values) {
  if (!greater(values, set1(best.value))) return;
  float lanes[LANES];
  store(lanes, values);
  for (int i = 0; i < LANES; ++i) best.offer(lanes[i], first_id + i);
}

PDS_INLINE void offer(Best& best, int64_t first_id, const Block& block) {
  if (!greater(block.highest(), set1(best.value))) return;
  for (int v = 0; v < BLOCK_VECTORS; ++v) offer(best, first_id + v * LANES, block.x[v]);
}

template <typename Logit>
Best find_best(const Row<Logit>& row, Range ids) {
  Best best{-INFINITE, ids.begin};
  row.for_each_block(ids, [&](int64_t start, const Block& block) __attribute__((always_inline)) {
    offer(best, start, block);
  });
  return best;
}

// Numbers in (0, 1) of random words.
PDS_INLINE F32 to_uniform(Words words) {
  F32 uniform = mul(add(unsigned_to_float(words), set1(0.5f)), set1(0x1p-32f));
  return min(uniform, set1(1.0f - 0x1p-24f));
}

PDS_INLINE F32 to_gumbel(F32 uniform) {
  F32 exponential = sub(zero(), exact::log_of_complement(uniform));
  return sub(zero(), exact::log(exponential));
}

// No noise is higher: the smallest u is 2^-33.
constexpr float MAX_NOISE = 22.875f;

// At least to_gumbel(u), more by 0.07 at most where that is large. -log(-log(1 - u)) <= -log(u),
// and the bits of a float, taken as an integer, are a piecewise linear bound of its logarithm.
PDS_INLINE F32 bound_gumbel(F32 uniform) {
  const float scale = -exact::LN_2 / (1 << exact::MANTISSA_BITS);
  const float margin = 1e-4f;  // for what is rounded, here and there
  return fma(signed_to_float(as_words(uniform)), set1(scale), set1(127 * exact::LN_2 + margin));
}

// The best of the tokens `ids` whose scaled logit reaches the threshold, noise added: that of
// `first_id` and those behind it. `ids` begins at a multiple of BLOCK.
template <typename Logit>
Best draw(const ScaledRow<Logit>& row, Range ids, int64_t first_id, float threshold,
          const Philox& philox) {
  Best best{-INFINITE, ids.begin};
  row.for_each_block(ids, [&](int64_t start, Block& block) __attribute__((always_inline)) {
    for (F32& x : block.x) x = select_less(x, set1(threshold), set1(-INFINITE), x);
    // Most blocks cannot have the best token, and most tokens of others cannot be it.
    if (!greater_equal(add(block.highest(), set1(MAX_NOISE)), set1(best.value))) return;
    Words words[BLOCK_VECTORS];
    philox.draw(static_cast<uint32_t>((first_id + start) / 4), words);
    for (int v = 0; v < BLOCK_VECTORS; ++v) {
      F32 uniform = to_uniform(words[v]);
      F32 bound = add(block.x[v], bound_gumbel(uniform));
      if (!greater_equal(bound, set1(best.value))) continue;
      offer(best, start + v * LANES, add(to_gumbel(uniform), block.x[v]));
    }
  });
  return best;
}

// A token is a candidate by what the ones above it weigh together: 1 each for top-k, and for top-p
// their probability, in fixed point and not normalised.
struct CountOfTokens {
  PDS_INLINE F32 operator()(F32 x) const {
    return select_less(x, set1(INFINITE), set1(1.0f), zero());
  }
};

struct Probability {
  float highest, threshold;

  PDS_INLINE F32 operator()(F32 x) const {
    F32 weight = exact::exp_to_fixed_point(sub(x, set1(highest)));
    // The first operand may be NaN, the second is then taken.
    return max(select_less(x, set1(threshold), zero(), weight), zero());
  }
};

struct Item {
  float value;
  int64_t weight;
};

inline int64_t sum_weights(const Item* begin, const Item* end) {
  int64_t sum = 0;
  for (; begin < end; ++begin) sum += begin->weight;
  return sum;
}

// The lowest value for which `weight_above` and the items above it weigh less than `limit`; -inf if
// there is none. The items are put in another order: quickselect, about two passes over them.
inline float select_lowest(Item* begin, Item* end, int64_t weight_above, double limit) {
  float lowest = -INFINITE;
  while (begin < end) {
    float a = begin->value, b = begin[(end - begin) / 2].value, c = end[-1].value;
    float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
    Item* equal = std::partition(begin, end, [=](const Item& item) { return item.value > pivot; });
    int64_t weight = weight_above + sum_weights(begin, equal);
    if (static_cast<double>(weight) >= limit) {
      end = equal;
      continue;
    }
    lowest = pivot;
    begin = std::partition(equal, end, [=](const Item& item) { return item.value == pivot; });
    weight_above = weight + sum_weights(equal, begin);
  }
  return lowest;
}

// Finds the threshold of a row by the weight of its tokens in buckets of nearly equal logits. Only
// the tokens of the one bucket in which it lies are then looked at one by one.
class Histogram {
 public:
  // The lowest logit for which those above it weigh less than `limit`; any that is not above the
  // lowest one if all of them weigh less. `highest` is the row's highest scaled logit.
  template <typename Logit, typename Weigh>
  float select(const ScaledRow<Logit>& row, float highest, const Weigh& weigh, double limit) {
    fill(row, highest, weigh, limit);
    const Boundary boundary = find_boundary(limit);
    items_.clear();
    row.for_each_vector([&](F32 x) __attribute__((always_inline)) {
      collect(x, static_cast<float>(boundary.bucket), highest, weigh);
    });
    Item* items = items_.data();
    return select_lowest(items, items + items_.size(), boundary.weight_above, limit);
  }

 private:
  // They reach down to where exp is 0 in fixed point.
  static constexpr int NUM_BUCKETS = 2048;
  static constexpr float BUCKETS_PER_UNIT = 64.0f;
  static constexpr int64_t TOKENS_BETWEEN_LOOKS = 64 * BLOCK;

  // Which bucket the logits belong to, before rounding down; NaN and all far below: the last.
  static PDS_INLINE F32 place(F32 x, float highest) {
    F32 distance = mul(sub(set1(highest), x), set1(BUCKETS_PER_UNIT));
    return min(distance, set1(NUM_BUCKETS - 1));
  }

  struct Boundary {
    int bucket;            // of the tokens seen so far, with those in it `limit` is reached
    int64_t weight_above;  // of all buckets before it
  };

  Boundary find_boundary(double limit) const {
    Boundary boundary{0, 0};
    while (boundary.bucket + 1 < NUM_BUCKETS) {
      const int64_t weight = boundary.weight_above + weights_[boundary.bucket];
      if (static_cast<double>(weight) >= limit) break;
      boundary = {boundary.bucket + 1, weight};
    }
    return boundary;
  }

  // Sums up the weights of the buckets, but for those of which it turns out on the way that the
  // threshold lies above them: these are most, and nothing is summed for them.
  template <typename Logit, typename Weigh>
  void fill(const ScaledRow<Logit>& row, float highest, const Weigh& weigh, double limit) {
    std::fill(weights_, weights_ + NUM_BUCKETS, 0);
    float end = NUM_BUCKETS;
    row.for_each_block({0, row.vocab_size()}, [&](int64_t start, const Block& block)
                                                  __attribute__((always_inline)) {
      for (const F32& x : block.x) count(x, end, highest, weigh);
      if (start % TOKENS_BETWEEN_LOOKS == 0)
        end = static_cast<float>(find_boundary(limit).bucket + 1);
    });
  }

  template <typename Weigh>
  PDS_INLINE void count(F32 x, float end, float highest, const Weigh& weigh) {
    F32 where = place(x, highest);
    const uint32_t found = greater(set1(end), where);
    if (!found) return;
    float weights[LANES];
    uint32_t buckets[LANES];
    store(weights, weigh(x));
    store_words(buckets, truncate_to_words(where));
    for_each_lane(found, [&](int i) { weights_[buckets[i]] += static_cast<int64_t>(weights[i]); });
  }

  template <typename Weigh>
  PDS_INLINE void collect(F32 x, float bucket, float highest, const Weigh& weigh) {
    F32 where = place(x, highest);
    uint32_t found = greater_equal(where, set1(bucket)) & greater(set1(bucket + 1.0f), where);
    if (!found) return;
    float values[LANES], weights[LANES];
    store(values, x);
    store(weights, weigh(x));
    for_each_lane(found, [&](int i) {
      if (weights[i] >= 1.0f) items_.push_back({values[i], static_cast<int64_t>(weights[i])});
    });
  }

  int64_t weights_[NUM_BUCKETS];
  std::vector<Item> items_;
};

// The lowest scaled logit that min-p, top-k and then top-p of a request keep.
template <typename Logit>
float find_threshold(const ScaledRow<Logit>& row, const SamplingRequests& requests, int64_t index,
                     Histogram& histogram) {
  const float highest = row.find_highest();
  float threshold = highest + requests.log_min_p[index];
  if (requests.has_top_k(index, row.vocab_size())) {
    const auto limit = static_cast<double>(requests.top_k[index]);
    threshold = std::max(threshold, histogram.select(row, highest, CountOfTokens(), limit));
  }
  if (requests.has_top_p(index)) {
    const Probability probability{highest, threshold};
    IntegerSum sum;
    row.for_each_vector([&](F32 x) __attribute__((always_inline)) {
      sum.add(probability(x));
    });
    const double limit = requests.top_p[index] * static_cast<double>(sum.total());
    threshold = std::max(threshold, histogram.select(row, highest, probability, limit));
  }
  return threshold;
}

}  // namespace detail

// How rows are cut, so that every thread has a part: [num_rows * per_row] in order.
struct RowParts {
  int64_t num_rows, vocab_size, per_row;

  RowParts(int64_t num_rows, int64_t vocab_size, int64_t num_threads)
      : num_rows(num_rows), vocab_size(vocab_size),
        per_row(std::max<int64_t>(1, num_threads / std::max<int64_t>(1, num_rows))) {}

  int64_t count() const { return num_rows * per_row; }
  int64_t row(int64_t part) const { return part / per_row; }
  Range ids(int64_t part) const {
    const Team parts{static_cast<int>(part % per_row), static_cast<int>(per_row)};
    return parts.share(vocab_size, detail::BLOCK);
  }
};

// The best token of every part. Threads take parts in turn: rows of one kind spread over them.
template <typename Logit>
void find_best(const Team& team, const Logits<Logit>& logits, const Mask& mask,
               const RowParts& parts, Best* best) {
  for (int64_t part = team.rank; part < parts.count(); part += team.size) {
    const int64_t row = parts.row(part);
    best[part] = detail::find_best(detail::Row<Logit>{logits.row(row), mask.row(row)},
                                   parts.ids(part));
  }
}

// The same for what the requests ask for. thresholds [num_rows] is scratch.
template <typename Logit>
void sample(const Team& team, const Logits<Logit>& logits, const Mask& mask,
            const SamplingRequests& requests, const RowParts& parts, float* thresholds,
            Best* best) {
  detail::Histogram histogram;
  auto row_of = [&](int64_t row) { return detail::Row<Logit>{logits.row(row), mask.row(row)}; };
  auto scaled_row = [&](int64_t row) {
    return detail::ScaledRow<Logit>{row_of(row), requests.divisor[row]};
  };
  for (int64_t row = team.rank; row < logits.num_rows; row += team.size)
    thresholds[row] = requests.has_filter(row, logits.vocab_size)
                          ? detail::find_threshold(scaled_row(row), requests, row, histogram)
                          : -INFINITE;
  team.barrier();
  for (int64_t part = team.rank; part < parts.count(); part += team.size) {
    const int64_t row = parts.row(part);
    const Philox philox(requests.seeds[row], requests.positions[row]);
    best[part] = requests.is_random(row)
                     ? detail::draw(scaled_row(row), parts.ids(part), requests.first_id,
                                    thresholds[row], philox)
                     : detail::find_best(row_of(row), parts.ids(part));
  }
}

// counts [num_rows]: how many logits of each row's allowed tokens are NaN.
template <typename Logit>
void count_nans(const Team& team, const Logits<Logit>& logits, const Mask& mask, int64_t* counts) {
  const Range rows = team.share(logits.num_rows);
  for (int64_t index = rows.begin; index < rows.end; ++index) {
    counts[index] = 0;
    const detail::Row<Logit> row{logits.row(index), mask.row(index)};
    row.for_each_block({0, row.vocab_size()}, [&](int64_t, const detail::Block& block) {
      for (const F32& x : block.x) counts[index] += __builtin_popcount(is_nan(x));
    });
  }
}

// What one thread has seen of a row of logits that are nowhere in memory.
struct SeenLogits {
  Best best;
  int64_t num_nans = 0;
};

// The panels of a weight in one part in which any of m rows may choose a token.
inline std::vector<int64_t> find_allowed_panels(const PackedLinear& weight, const Mask& mask,
                                                int64_t m) {
  std::vector<int64_t> panels;
  for (int64_t panel = 0; panel < weight.num_panels(); ++panel) {
    uint64_t bits = 0;
    for (int64_t row = 0; row < m && bits == 0; ++row) bits = mask.row(row).bits(panel * PANEL);
    if (bits != 0) panels.push_back(panel);
  }
  return panels;
}

// Goes through the logits of `linear` in `panels` without writing them down. seen [m] is this
// thread's own, and is about the outputs that it computed.
inline void linear_argmax(const Team& team, const bf16* x, int64_t m, const PackedLinear& weight,
                          const Mask& mask, const std::vector<int64_t>& panels, SeenLogits* seen) {
  if (panels.empty()) return;
  alignas(64) float sums[MAX_BLOCK_ROWS * PANEL];
  const auto num_panels = static_cast<int64_t>(panels.size());
  detail::for_each_panel(team, m, num_panels, [&](Range rows, int64_t index, int64_t next) {
    const int64_t panel = panels[index];
    multiply_panel(x + rows.begin * weight.k, rows.end - rows.begin, weight, panel, panels[next],
                   sums);
    const detail::Biases biases(weight, panel);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      float logits[PANEL];
      for (int v = 0; v < PANEL_VECTORS; ++v)
        store(logits + v * LANES, rounded_to_bf16(biases.add_to(
                                      sums + (row - rows.begin) * PANEL, v)));
      detail::Block block(logits, 0, weight.num_outputs(panel));
      block.keep(mask.row(row).bits(panel * PANEL));
      detail::offer(seen[row].best, weight.first_output(panel), block);
      for (const F32& vector : block.x) seen[row].num_nans += __builtin_popcount(is_nan(vector));
    }
  });
}

}  // namespace pds
