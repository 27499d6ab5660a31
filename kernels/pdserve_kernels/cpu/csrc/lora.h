// What adapters add to the outputs of dense layers, for some rows each: scale * B (A x).
//
// A x, the shrink, is summed in fp32 in LANES chains over ascending inputs, which are then added up,
// halves first. The expand adds it to the layer's own sums rank by rank, ascending, before they are
// rounded. So a row's bits depend on the row and its own adapter alone.
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
  const bf16* a;        // [num_ranks][k, rounded up to a vector of pairs], zeros behind k
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

  // sums [rows][PANEL] += what the adapters of the rows say for a panel.
  void add_to(Range rows, int64_t panel, float* sums) const {
    for (int64_t i = 0; i < num_segments; ++i) {
      if (weight(i).num_ranks == 0) continue;
      const LoraPanel& part_of_panel = weight(i).panels[panel];
      const int64_t end = std::min(rows.end, segments[i].end);
      for (int64_t row = std::max(rows.begin, segments[i].begin); row < end; ++row)
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

// out[0 .. count) = scales * (x . a), for rows of `a` that are `stride` apart.
template <int COUNT>
PDS_INLINE void shrink_row(const bf16* x, int64_t k, const bf16* a, int64_t stride,
                           const float* scales, float* out) {
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
  for (int rank = 0; rank < COUNT; ++rank) out[rank] = scales[rank] * sum_lanes(sums[rank]);
}

}  // namespace detail

// Shrinks this thread's share of x [rows, k]: all threads need all of it, behind a barrier. Each of
// them could do all of it instead, but would read all adapters then.
inline void shrink_share(const Team& team, const bf16* x, int64_t k, const LoraRows& lora) {
  using namespace detail;
  const int64_t stride = (k + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
  int64_t unit = 0;
  for (int64_t i = 0; i < lora.num_segments; ++i) {
    const LoraWeight& weight = lora.weight(i);
    const LoraSegment& segment = lora.segments[i];
    for (int64_t first = segment.begin; first < segment.end; first += SHRUNK_ROWS)
      for (int64_t rank = 0; rank < weight.num_ranks; rank += SHRUNK_RANKS) {
        if (unit++ % team.size != team.rank) continue;
        const bf16* a = weight.a + rank * stride;
        const int64_t end = std::min(segment.end, first + SHRUNK_ROWS);
        for (int64_t row = first; row < end; ++row) {
          float* out = lora.shrunk + row * lora.row_ranks + rank;
          if (rank + SHRUNK_RANKS <= weight.num_ranks) {
            shrink_row<SHRUNK_RANKS>(x + row * k, k, a, stride, weight.scales + rank, out);
            continue;
          }
          for (int64_t last = 0; rank + last < weight.num_ranks; ++last)
            shrink_row<1>(x + row * k, k, a + last * stride, stride, weight.scales + rank + last,
                          out + last);
        }
      }
  }
}

// As `shrink_share`, and a barrier, if there is something to shrink.
inline void shrink(const Team& team, const bf16* x, int64_t k, const LoraRows& lora) {
  for (int64_t i = 0; i < lora.num_segments; ++i)
    if (lora.weight(i).num_ranks > 0) {
      shrink_share(team, x, k, lora);
      return team.barrier();
    }
}

}  // namespace pds
