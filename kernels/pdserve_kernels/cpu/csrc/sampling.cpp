#include "sampling.h"

namespace pds {

// Calls body with the logits in their type.
template <typename Body>
static void with_logits(const void* data, int64_t is_bf16, int64_t num_rows, int64_t vocab_size,
                        int64_t stride, const Body& body) {
  if (is_bf16)
    body(Logits<bf16>{static_cast<const bf16*>(data), num_rows, vocab_size, stride});
  else
    body(Logits<float>{static_cast<const float*>(data), num_rows, vocab_size, stride});
}

// tokens [num_rows]: the best over the parts of each row, which are in the order of their ids; values
// [num_rows]: what they were compared by.
static void merge(const RowParts& parts, const std::vector<Best>& best, int64_t* tokens,
                  float* values) {
  for (int64_t row = 0; row < parts.num_rows; ++row) {
    Best winner = best[row * parts.per_row];
    for (int64_t i = 1; i < parts.per_row; ++i) {
      const Best& other = best[row * parts.per_row + i];
      winner.offer(other.value, other.token_id);
    }
    tokens[row] = winner.token_id;
    values[row] = winner.value;
  }
}

static void merge(const std::vector<SeenLogits>& seen, int64_t m, int64_t* tokens,
                  int64_t* num_nans, float* values) {
  for (int64_t row = 0; row < m; ++row) {
    SeenLogits all;
    for (size_t i = row; i < seen.size(); i += m) {
      const Best& other = seen[i].best;
      // Threads do not see the outputs in order.
      const bool is_lower = other.value == all.best.value && other.token_id < all.best.token_id;
      if (other.value > all.best.value || is_lower) all.best = other;
      all.num_nans += seen[i].num_nans;
    }
    tokens[row] = all.best.token_id;
    num_nans[row] = all.num_nans;
    values[row] = all.best.value;
  }
}

}  // namespace pds

extern "C" {

// Logits are [num_rows, vocab_size], fp32 or bf16, rows `stride` apart; outputs are [num_rows].
// Masks are [num_rows, ceil(vocab_size / 32)] or null.

void pds_argmax(const void* data, int64_t is_bf16, int64_t num_rows, int64_t vocab_size,
                int64_t stride, const uint32_t* mask, int64_t* tokens, float* values) {
  const pds::RowParts parts(num_rows, vocab_size, omp_get_max_threads());
  std::vector<pds::Best> best(parts.count());
  pds::with_logits(data, is_bf16, num_rows, vocab_size, stride, [&](const auto& logits) {
    pds::run_team([&](const pds::Team& team) {
      find_best(team, logits, pds::Mask{mask, vocab_size}, parts, best.data());
    });
  });
  merge(parts, best, tokens, values);
}

void pds_count_nans(const void* data, int64_t is_bf16, int64_t num_rows, int64_t vocab_size,
                    int64_t stride, const uint32_t* mask, int64_t* counts) {
  pds::with_logits(data, is_bf16, num_rows, vocab_size, stride, [&](const auto& logits) {
    pds::run_team([&](const pds::Team& team) {
      count_nans(team, logits, pds::Mask{mask, vocab_size}, counts);
    });
  });
}

void pds_sample(const void* data, int64_t is_bf16, int64_t num_rows, int64_t vocab_size,
                int64_t stride, const uint32_t* mask, const float* temperature, const float* divisor,
                const int64_t* top_k, const double* top_p, const float* log_min_p,
                const int64_t* seeds, const int64_t* positions, int64_t first_id, int64_t* tokens,
                float* values) {
  const pds::SamplingRequests requests{temperature, divisor, top_k,     top_p,
                                       log_min_p,   seeds,   positions, first_id};
  const pds::RowParts parts(num_rows, vocab_size, omp_get_max_threads());
  std::vector<pds::Best> best(parts.count());
  std::vector<float> thresholds(num_rows);
  pds::with_logits(data, is_bf16, num_rows, vocab_size, stride, [&](const auto& logits) {
    pds::run_team([&](const pds::Team& team) {
      sample(team, logits, pds::Mask{mask, vocab_size}, requests, parts, thresholds.data(),
             best.data());
    });
  });
  merge(parts, best, tokens, values);
}

// The argmax of the allowed numbers of pds_linear's rows, how many of them are NaN, and the highest of
// them. The weight has one part.
void pds_linear_argmax(const pds::bf16* x, int64_t m, const pds::PackedLinear* weight,
                       const uint32_t* words, int64_t* tokens, int64_t* num_nans,
                       float* values) {
  const pds::Mask mask{words, weight->n};
  const std::vector<int64_t> panels = pds::find_allowed_panels(*weight, mask, m);
  std::vector<pds::SeenLogits> seen(m * omp_get_max_threads());
  pds::run_team([&](const pds::Team& team) {
    pds::linear_argmax(team, x, m, *weight, mask, panels, seen.data() + team.rank * m);
  });
  merge(seen, m, tokens, num_nans, values);
}

}  // extern "C"
