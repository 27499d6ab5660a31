#include "linear.h"

namespace pds {

// A row's pairs that are written at once: the cache line that is read holds as many.
static constexpr int64_t PACKED_PAIRS = 16;

// Fills pairs [first, last) of one of a panel's outputs from the output's row of the weight.
static void pack_row(const bf16* row, int64_t source_k, int64_t first, int64_t last, bf16* output) {
  const int64_t whole = std::min(last, source_k / 2);
  for (int64_t pair = first; pair < whole; ++pair)
    std::memcpy(output + pair * PANEL * 2, row + 2 * pair, 2 * sizeof(bf16));
  if (whole < last) {
    output[whole * PANEL * 2] = row[2 * whole];
    output[whole * PANEL * 2 + 1] = 0;
  }
}

// Fills this thread's panels from weight [n, source_k], whose rows are `row_stride` apart; source_k
// is k or k - 1.
static void pack(const Team& team, const bf16* weight, int64_t row_stride, int64_t source_k,
                 const PackedLinear& packed, bf16* panels) {
  const int64_t num_pairs = packed.k / 2;
  const Range share = team.share(packed.num_panels());
  for (int64_t index = share.begin; index < share.end; ++index) {
    const bf16* rows = weight + packed.first_output(index) * row_stride;
    bf16* panel = panels + index * PANEL * packed.k;
    if (packed.num_outputs(index) < PANEL) std::fill(panel, panel + PANEL * packed.k, 0);
    for (int64_t pair = 0; pair < num_pairs; pair += PACKED_PAIRS)
      for (int64_t row = 0; row < packed.num_outputs(index); ++row)
        pack_row(rows + row * row_stride, source_k, pair, std::min(num_pairs, pair + PACKED_PAIRS),
                 panel + row * 2);
  }
}

}  // namespace pds

extern "C" {

// Packs weight [n, source_k] of n / num_parts outputs a part into panels, as PackedLinear has them.
void pds_pack_linear(const pds::bf16* weight, int64_t row_stride, int64_t n, int64_t source_k,
                     int64_t num_parts, pds::bf16* panels) {
  const pds::PackedLinear packed{panels, nullptr, n, source_k + source_k % 2, num_parts};
  pds::run_team([&](const pds::Team& team) {
    pds::pack(team, weight, row_stride, source_k, packed, panels);
  });
}

void pds_linear(const pds::bf16* x, int64_t m, const pds::PackedLinear* weight, pds::bf16* out) {
  pds::run_team([&](const pds::Team& team) { pds::linear(team, x, m, *weight, out); });
}

// pds_linear with adapters; each segment's are of this weight alone, as a layer's qkv, and shrunk is
// memory for m rows of row_ranks numbers.
void pds_linear_lora(const pds::bf16* x, int64_t m, const pds::PackedLinear* weight,
                     const pds::LoraSegment* segments, int64_t num_segments, float* shrunk,
                     int64_t row_ranks, pds::bf16* out) {
  const pds::LoraRows lora{segments, num_segments, 0, &pds::LoraLayer::qkv, shrunk, row_ranks};
  pds::run_team([&](const pds::Team& team) {
    pds::shrink(team, x, m, *weight, lora);
    pds::linear(team, x, m, *weight, out, lora);
  });
}

// shrunk [m][row_ranks] = the part of A x that these inputs make, without the scales.
void pds_shrink_lora(const pds::bf16* x, int64_t m, const pds::PackedLinear* weight,
                     const pds::LoraSegment* segments, int64_t num_segments, float* shrunk,
                     int64_t row_ranks) {
  const pds::LoraRows lora{segments, num_segments, 0, &pds::LoraLayer::qkv, shrunk, row_ranks};
  pds::run_team([&](const pds::Team& team) {
    pds::shrink_share(team, x, *weight, pds::Range{0, m}, lora, true, shrunk);
  });
}

// sums [m, n] += B shrunk, which has the scales.
void pds_expand_lora(float* sums, int64_t m, const pds::PackedLinear* weight,
                     const pds::LoraSegment* segments, int64_t num_segments, float* shrunk,
                     int64_t row_ranks) {
  const pds::LoraRows lora{segments, num_segments, 0, &pds::LoraLayer::qkv, shrunk, row_ranks};
  pds::run_team([&](const pds::Team& team) { pds::expand(team, m, *weight, lora, sums); });
}

void pds_linear_sums(const pds::bf16* x, int64_t m, const pds::PackedLinear* weight, float* out) {
  pds::run_team([&](const pds::Team& team) { pds::linear_sums(team, x, m, *weight, out); });
}

void pds_linear_silu_mul(const pds::bf16* x, int64_t m, const pds::PackedLinear* weight,
                         pds::bf16* out) {
  pds::run_team([&](const pds::Team& team) { pds::linear_silu_mul(team, x, m, *weight, out); });
}

}  // extern "C"
