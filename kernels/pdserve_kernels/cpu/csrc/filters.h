// The lowest logit that min-p, top-k and top-p keep, found without a sort of the row.
#pragma once

#include <cstring>

#include "exact_math.h"
#include "logits.h"

namespace pds {

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

// Calls body with the indexes of the bits that are set.
template <typename Body>
PDS_INLINE void for_each_lane(uint32_t mask, const Body& body) {
  for (; mask != 0; mask &= mask - 1) body(__builtin_ctz(mask));
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

// Numbers as integers in the same order, with one for both zeros. NaN has none.
inline int64_t to_key(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits < 0 ? -int64_t{bits & 0x7fffffff} : bits;
}

inline float from_key(int64_t key) {
  const auto bits = static_cast<uint32_t>(key < 0 ? 0x80000000 - key : key);
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// A threshold lies from `low` to `high`, two keys; what is above them weighs `weight_above`.
struct Bounds {
  int64_t low, high, weight_above;
};

// Finds the threshold of a row by the weight of its tokens in buckets of nearly equal logits. Only
// the tokens of the one bucket in which it lies are then looked at one by one. If they are many, this
// bucket's keys are cut into buckets before, three times at most: three times 11 bits are all of a
// key. So a row is read 7 times at most, whatever its logits are.
class Histogram {
 public:
  // The lowest logit for which those above it weigh less than `limit`; any that is not above the
  // lowest one if all of them weigh less. `highest` is the row's highest scaled logit.
  template <typename Logit, typename Weigh>
  float select(const ScaledRow<Logit>& row, float highest, const Weigh& weigh, double limit) {
    fill(row, highest, weigh, limit);
    Bounds bounds = find_bounds(highest, limit);
    while (bounds.low < bounds.high && !collect(row, weigh, bounds))
      narrow(row, weigh, limit, bounds);
    return bounds.low < bounds.high ? search(bounds, limit) : from_key(bounds.low);
  }

 private:
  // They reach down to where exp is 0 in fixed point.
  static constexpr int NUM_BUCKETS = 2048;
  static constexpr float BUCKETS_PER_UNIT = 64.0f;
  static constexpr int64_t TOKENS_BETWEEN_LOOKS = 64 * BLOCK;
  static constexpr int64_t MAX_ITEMS = 1024;

  struct Item {
    float value;
    int64_t weight;
  };

  // Which bucket the logits belong to, before rounding down; NaN and all far below: the last.
  static PDS_INLINE F32 place(F32 x, float highest) {
    F32 distance = mul(sub(set1(highest), x), set1(BUCKETS_PER_UNIT));
    return min(distance, set1(NUM_BUCKETS - 1));
  }

  struct Boundary {
    int bucket;            // of the tokens seen so far, with those in it `limit` is reached
    int64_t weight_above;  // of all buckets before it
  };

  Boundary find_boundary(double limit, int num_buckets = NUM_BUCKETS,
                         int64_t weight_above = 0) const {
    Boundary boundary{0, weight_above};
    while (boundary.bucket + 1 < num_buckets) {
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

  // The lowest key, up to that of `highest`, whose place is below `end`.
  static int64_t first_key(float end, float highest) {
    int64_t low = to_key(-INFINITE), high = to_key(highest);
    while (low < high) {
      const int64_t key = low + (high - low) / 2;
      if (greater(set1(end), place(set1(from_key(key)), highest)))
        high = key;
      else
        low = key + 1;
    }
    return low;
  }

  Bounds find_bounds(float highest, double limit) const {
    const Boundary boundary = find_boundary(limit);
    const int64_t low = first_key(static_cast<float>(boundary.bucket + 1), highest);
    const int64_t high = boundary.bucket == 0
                              ? to_key(highest)
                              : first_key(static_cast<float>(boundary.bucket), highest) - 1;
    return {low, high, boundary.weight_above};
  }

  // Cuts the keys into equal buckets, and leaves those of one.
  template <typename Logit, typename Weigh>
  void narrow(const ScaledRow<Logit>& row, const Weigh& weigh, double limit, Bounds& bounds) {
    int shift = 0;
    while ((bounds.high - bounds.low) >> shift >= NUM_BUCKETS) ++shift;
    std::fill(weights_, weights_ + NUM_BUCKETS, 0);
    for_each_vector_between(row, bounds, [&](F32 x, uint32_t found)
                                             __attribute__((always_inline)) {
      for_each_token(x, found, weigh, [&](float value, int64_t weight) {
        weights_[(bounds.high - to_key(value)) >> shift] += weight;
      });
    });
    const int last = static_cast<int>((bounds.high - bounds.low) >> shift);
    const Boundary boundary = find_boundary(limit, last + 1, bounds.weight_above);
    const int64_t high = bounds.high - (int64_t{boundary.bucket} << shift);
    bounds = {std::max(bounds.low, high - (int64_t{1} << shift) + 1), high, boundary.weight_above};
  }

  // False if there are too many; the bounds are then the lowest and the highest one of them.
  template <typename Logit, typename Weigh>
  bool collect(const ScaledRow<Logit>& row, const Weigh& weigh, Bounds& bounds) {
    num_items_ = 0;
    F32 lowest = set1(INFINITE), highest = set1(-INFINITE);
    for_each_vector_between(row, bounds, [&](F32 x, uint32_t found)
                                             __attribute__((always_inline)) {
      lowest = min(lowest, select_bits(found, x, set1(INFINITE)));
      highest = max(highest, select_bits(found, x, set1(-INFINITE)));
      if (num_items_ > MAX_ITEMS) return;
      for_each_token(x, found, weigh, [&](float value, int64_t weight) {
        if (weight > 0) items_[num_items_++] = {value, weight};
      });
    });
    if (num_items_ <= MAX_ITEMS) return true;
    bounds.low = to_key(-max_lanes(sub(zero(), lowest)));
    bounds.high = to_key(max_lanes(highest));
    return false;
  }

  // Calls body(vector, which of its lanes) for the tokens of a row between bounds.
  template <typename Logit, typename Body>
  static PDS_INLINE void for_each_vector_between(const ScaledRow<Logit>& row, const Bounds& bounds,
                                                 const Body& body) {
    const F32 low = set1(from_key(bounds.low)), high = set1(from_key(bounds.high));
    row.for_each_vector([&](F32 x) __attribute__((always_inline)) {
      const uint32_t found = greater_equal(x, low) & greater_equal(high, x);
      if (found) body(x, found);
    });
  }

  // Calls body(value, weight) for some lanes of a vector.
  template <typename Weigh, typename Body>
  static PDS_INLINE void for_each_token(F32 x, uint32_t lanes, const Weigh& weigh,
                                        const Body& body) {
    float values[LANES], weights[LANES];
    store(values, x);
    store(weights, weigh(x));
    for_each_lane(lanes, [&](int i) { body(values[i], static_cast<int64_t>(weights[i])); });
  }

  // The lowest item above which the weight is less than `limit`.
  float search(const Bounds& bounds, double limit) {
    std::sort(items_, items_ + num_items_,
              [](const Item& a, const Item& b) { return a.value > b.value; });
    float lowest = from_key(bounds.low);
    int64_t weight_above = bounds.weight_above;
    for (int64_t i = 0; i < num_items_ && static_cast<double>(weight_above) < limit; ++i) {
      lowest = items_[i].value;
      weight_above += items_[i].weight;
    }
    return lowest;
  }

  int64_t weights_[NUM_BUCKETS];
  Item items_[MAX_ITEMS + LANES];
  int64_t num_items_ = 0;
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

}  // namespace pds
