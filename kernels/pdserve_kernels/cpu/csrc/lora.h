// What adapters add to the outputs of dense layers, for some rows each: scale * B (A x).
//
// A x, the shrink, is summed in fp32 in LANES chains over ascending inputs, which are then added up,
// halves first. Inputs that ranks may share are several equal parts, as those of the layer's own sums
// (packed_linear.h), added as one binary tree. The expand adds it to the layer's own sums rank by
// rank, ascending, before they are rounded. So a row's bits depend on the row and its own adapter
// alone, however many ranks there are.
#pragma once

#include <cstring>

#include "packed_linear.h"
#include "team.h"

namespace pds {

// What an adapter adds to a panel's outputs.
struct LoraPanel {
  const bf16* b;  // [num_ranks][PANEL], zeros where the panel has other outputs, or none
  int64_t first_rank, num_ranks;
};

// An adapter's part in a weight [n, k].
struct LoraWeight {
  // [num_ranks][num_sums of the weight][k / num_sums, rounded up to a vector of pairs], zeros behind
  const bf16* a;
  const float* scales;  // [num_ranks]
  const LoraPanel* panels;
  int64_t num_ranks;  // 0: it has none
};

struct LoraLayer {
  LoraWeight qkv, attention_output, gate_up, down;
};

// Rows [begin, end) of a step, and their adapter.
struct LoraSegment {
  int64_t begin, end;
  const LoraLayer* layers;
};

// Segments in one of a layer's weights, and where the shrunk rows lie: [rows][row_ranks].
struct LoraRows {
  const LoraSegment* segments = nullptr;
  int64_t num_segments = 0;
  int64_t layer = 0;
  const LoraWeight LoraLayer::* part = nullptr;
  float* shrunk = nullptr;
  int64_t row_ranks = 0;

  const LoraWeight& weight(int64_t segment) const { return segments[segment].layers[layer].*part; }
  // Those of `rows` that are a segment's; end may lie before begin.
  Range rows_of(int64_t segment, Range rows) const {
    return {std::max(rows.begin, segments[segment].begin), std::min(rows.end, segments[segment].end)};
  }
  bool is_empty() const {
    for (int64_t i = 0; i < num_segments; ++i)
      if (weight(i).num_ranks > 0) return false;
    return true;
  }

  // sums [rows][PANEL] += what the adapters of the rows say for a panel.
  void add_to(Range rows, int64_t panel, float* sums) const {
    for (int64_t i = 0; i < num_segments; ++i) {
      if (weight(i).num_ranks == 0) continue;
      const LoraPanel& part_of_panel = weight(i).panels[panel];
      const Range adapted = rows_of(i, rows);
      for (int64_t row = adapted.begin; row < adapted.end; ++row)
        expand(part_of_panel, shrunk + row * row_ranks + part_of_panel.first_rank,
               sums + (row - rows.begin) * PANEL);
    }
  }

 private:
  static void expand(const LoraPanel& panel, const float* shrunk_row, float* sums) {
    F32 tile[PANEL_VECTORS];
    for (int v = 0; v < PANEL_VECTORS; ++v) tile[v] = load(sums + v * LANES);
    for (int64_t rank = 0; rank < panel.num_ranks; ++rank) {
      const F32 factor = set1(shrunk_row[rank]);
      for (int v = 0; v < PANEL_VECTORS; ++v)
        tile[v] = fma(factor, load_bf16(panel.b + rank * PANEL + v * LANES), tile[v]);
    }
    for (int v = 0; v < PANEL_VECTORS; ++v) store(sums + v * LANES, tile[v]);
  }
};

namespace detail {

constexpr int SHRUNK_RANKS = 4;  // summed at a time: they wait for each other less than one would
constexpr int64_t SHRUNK_ROWS = 16;  // that a thread takes at a time

// Where A has the inputs of a sum, and the sum of x's.
struct ShrunkInputs {
  int64_t num_sums, size, stride;  // inputs of a sum, and from one sum's to the next's in A

  explicit ShrunkInputs(const PackedLinear& weight)
      : num_sums(weight.num_sums), size(weight.k / num_sums),
        stride((size + 2 * LANES - 1) / (2 * LANES) * (2 * LANES)) {}
  int64_t rank_stride() const { return num_sums * stride; }
};

// sums[0 .. COUNT) = x [k] . a, for rows of `a` that are `stride` apart.
template <int COUNT>
PDS_INLINE void shrink_part(const bf16* x, int64_t k, const bf16* a, int64_t stride, float* out) {
  F32 sums[COUNT];
  for (int rank = 0; rank < COUNT; ++rank) sums[rank] = zero();
  auto add_pairs = [&](Pairs pairs, int64_t input) __attribute__((always_inline)) {
    for (int rank = 0; rank < COUNT; ++rank)
      sums[rank] = dot_pairs(sums[rank], pairs, load_pairs(a + rank * stride + input));
  };
  int64_t input = 0;
  for (; input + 2 * LANES <= k; input += 2 * LANES) add_pairs(load_pairs(x + input), input);
  if (input < k) {
    bf16 rest[2 * LANES] = {};
    std::memcpy(rest, x + input, static_cast<size_t>(k - input) * sizeof(bf16));
    add_pairs(load_pairs(rest), input);
  }
  for (int rank = 0; rank < COUNT; ++rank) out[rank] = sum_lanes(sums[rank]);
}

// out[0 .. COUNT) = x . a, of which `scales` are the factors, or null: 1.
template <int COUNT>
PDS_INLINE void shrink_row(const bf16* x, const ShrunkInputs& inputs, const bf16* a,
                           const float* scales, float* out) {
  float stack[STACK_SIZE][COUNT];
  for (int64_t i = 0; i < inputs.num_sums; ++i) {
    // As multiply_panel's: what i + 1 carries is whole.
    float(*top)[COUNT] = stack + __builtin_popcountll(i);
    shrink_part<COUNT>(x + i * inputs.size, inputs.size, a + i * inputs.stride,
                       inputs.rank_stride(), *top);
    for (int64_t carry = i + 1; carry % 2 == 0; carry /= 2, --top)
      for (int rank = 0; rank < COUNT; ++rank) top[-1][rank] += top[0][rank];
  }
  for (int rank = 0; rank < COUNT; ++rank)
    out[rank] = scales == nullptr ? stack[0][rank] : scales[rank] * stack[0][rank];
}

}  // namespace detail

// Shrinks this thread's share of some rows of x [.., k] into out [rows][row_ranks]: all threads need
// all of it, behind a barrier. Each of them could do all of it instead, but would read all adapters
// then. Of inputs that ranks share it is a part, which has no scales yet.
inline void shrink_share(const Team& team, const bf16* x, const PackedLinear& weight, Range rows,
                         const LoraRows& lora, bool is_part, float* out) {
  using namespace detail;
  const ShrunkInputs inputs(weight);
  int64_t unit = 0;
  for (int64_t i = 0; i < lora.num_segments; ++i) {
    const LoraWeight& adapter = lora.weight(i);
    const Range adapted = lora.rows_of(i, rows);
    for (int64_t first = adapted.begin; first < adapted.end; first += SHRUNK_ROWS)
      for (int64_t rank = 0; rank < adapter.num_ranks; rank += SHRUNK_RANKS) {
        if (unit++ % team.size != team.rank) continue;
        const bf16* a = adapter.a + rank * inputs.rank_stride();
        const float* scales = is_part ? nullptr : adapter.scales + rank;
        const int64_t end = std::min(adapted.end, first + SHRUNK_ROWS);
        for (int64_t row = first; row < end; ++row) {
          const bf16* states = x + row * weight.k;
          float* target = out + (row - rows.begin) * lora.row_ranks + rank;
          if (rank + SHRUNK_RANKS <= adapter.num_ranks) {
            shrink_row<SHRUNK_RANKS>(states, inputs, a, scales, target);
            continue;
          }
          for (int64_t last = 0; rank + last < adapter.num_ranks; ++last)
            shrink_row<1>(states, inputs, a + last * inputs.rank_stride(),
                          is_part ? nullptr : scales + last, target + last);
        }
      }
  }
}

// As `shrink_share` of all m rows, and a barrier, if there is something to shrink.
inline void shrink(const Team& team, const bf16* x, int64_t m, const PackedLinear& weight,
                   const LoraRows& lora) {
  if (lora.is_empty()) return;
  shrink_share(team, x, weight, Range{0, m}, lora, false, lora.shrunk);
  team.barrier();
}

}  // namespace pds
