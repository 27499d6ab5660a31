#include "linear_int.h"

#include <xmmintrin.h>

#include "shorts.h"

namespace pds {
namespace {

// The integers of one group of a panel as bf16: `pairs<V>(p)` is the V-th vector of what lies at p.
template <bool HAS_ZEROS>
struct Int8Group {
  static constexpr int BYTES = PANEL * 2;  // for every two inputs
  const uint8_t* zeros;

  template <int V>
  PDS_INLINE Pairs pairs(const uint8_t* p) const {
    constexpr int offset = V * 2 * LANES;
    if constexpr (!HAS_ZEROS) return pairs_of_int8(p + offset);
    else return pairs_of(sub(shorts_of_int8(p + offset), shorts_of_int8(zeros + offset)));
  }
};

template <bool HAS_ZEROS>
struct Int4Group {
  static constexpr int BYTES = PANEL;
  const uint8_t* zeros;

  template <int V>
  PDS_INLINE Pairs pairs(const uint8_t* p) const {
    const Shorts words = load_shorts(p);
    if constexpr (!HAS_ZEROS) return pairs_of_nibbles<V>(words);
    else return pairs_of_small(sub(nibbles<V>(words), shorts_of_int8(zeros + V * 2 * LANES)));
  }
};

// Memory is read so far ahead of its use.
constexpr int64_t AHEAD_BYTES = 2048;

template <int FIRST, typename Group>
PDS_INLINE void load_vectors(const Group& group, const uint8_t* p, Pairs (&w)[TILE_VECTORS]) {
  w[0] = group.template pairs<FIRST>(p);
  if constexpr (TILE_VECTORS == 4) {
    w[1] = group.template pairs<FIRST + 1>(p);
    w[2] = group.template pairs<FIRST + 2>(p);
    w[3] = group.template pairs<FIRST + 3>(p);
  }
}

PDS_INLINE F32 load_scale(const IntegerScales& integers, int64_t offset) {
  return integers.has_fp32_scales ? load(static_cast<const float*>(integers.scales) + offset)
                          : load_bf16(static_cast<const bf16*>(integers.scales) + offset);
}

// sums = x [ROWS, k] @ panel^T of some inputs, of the panel's vectors from FIRST on.
template <typename Group, int ROWS, int FIRST = 0>
__attribute__((noinline)) void multiply_int_tile(const bf16* x, const PackedLinear& weight,
                                                 int64_t panel, Range inputs,
                                                 const PartialSums& sums) {
  const IntegerScales& integers = weight.integers;
  const int64_t num_groups = (weight.k + integers.group_size - 1) / integers.group_size;
  const uint8_t* p = weight.panel(panel) + inputs.begin / 2 * Group::BYTES;
  F32 totals[ROWS][TILE_VECTORS];
  for (auto& row : totals)
    for (F32& total : row) total = zero();
  int64_t k = inputs.begin;
  int64_t group_end = k / integers.group_size * integers.group_size;
  for (int64_t g = panel * num_groups + k / integers.group_size; k < inputs.end; ++g) {
    group_end += integers.group_size;
    const Group group{integers.zeros == nullptr ? nullptr : integers.zeros + g * PANEL * 2};
    const int64_t end = std::min(inputs.end, group_end);
    F32 tile[ROWS][TILE_VECTORS];
    for (auto& row : tile)
      for (F32& sum : row) sum = zero();
    for (; k < end; k += 2, p += Group::BYTES) {
      for (int line = 0; line < Group::BYTES; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(p) + AHEAD_BYTES + line, _MM_HINT_T0);
      Pairs w[TILE_VECTORS];
      load_vectors<FIRST>(group, p, w);
      for (int row = 0; row < ROWS; ++row) {
        const Pairs a = broadcast_pair(x + row * weight.k + k);
        for (int v = 0; v < TILE_VECTORS; ++v) tile[row][v] = dot_pairs(tile[row][v], a, w[v]);
      }
    }
    for (int v = 0; v < TILE_VECTORS; ++v) {
      const F32 scale = load_scale(integers, g * PANEL + (FIRST + v) * LANES);
      for (int row = 0; row < ROWS; ++row) totals[row][v] = fma(scale, tile[row][v], totals[row][v]);
    }
  }
  sums.store_from(totals, FIRST);
  if constexpr (FIRST + TILE_VECTORS < PANEL_VECTORS)
    multiply_int_tile<Group, ROWS, FIRST + TILE_VECTORS>(x, weight, panel, inputs, sums);
}

template <typename Group, int ROWS = TILE_ROWS, typename... Args>
PDS_INLINE void multiply_int_tile_of(int64_t rows, const Args&... args) {
  if (rows == ROWS) return multiply_int_tile<Group, ROWS>(args...);
  if constexpr (ROWS > 1) multiply_int_tile_of<Group, ROWS - 1>(rows, args...);
}

template <typename Group>
void multiply_int_rows(const bf16* x, int64_t rows, const PackedLinear& weight, int64_t panel,
                       Range inputs, const PartialSums& sums) {
  const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    // Of nearly equal height: low ones use the registers badly.
    const int64_t row = rows * tile / tiles, end = rows * (tile + 1) / tiles;
    multiply_int_tile_of<Group>(end - row, x + row * weight.k, weight, panel, inputs,
                                sums.of_row(row));
  }
}

}  // namespace

void multiply_int_panel(const bf16* x, int64_t rows, const PackedLinear& weight, int64_t panel,
                        Range inputs, const PartialSums& sums) {
  const bool has_zeros = weight.integers.zeros != nullptr;
  const auto multiply = weight.bits == 8
                            ? (has_zeros ? &multiply_int_rows<Int8Group<true>>
                                         : &multiply_int_rows<Int8Group<false>>)
                            : (has_zeros ? &multiply_int_rows<Int4Group<true>>
                                         : &multiply_int_rows<Int4Group<false>>);
  multiply(x, rows, weight, panel, inputs, sums);
}

}  // namespace pds
