// Choosing tokens: argmax, and Gumbel-max over the logits that filters keep. What is chosen is defined
// by pdserve_kernels/reference/sampling/sample.py, to the bit.
#pragma once

#include <vector>

#include "filters.h"
#include "philox.h"

namespace pds {

// The best token so far, the first one among equals if they are offered in order.
struct Best {
  float value = -INFINITE;
  int64_t token_id = 0;

  void offer(float other_value, int64_t other_id) {
    if (other_value > value) *this = {other_value, other_id};
  }
};

namespace detail {

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
