// How the weight of a dense layer lies in memory.
#pragma once

#include <xmmintrin.h>

#include <algorithm>

#include "isa.h"

namespace pds {

constexpr int PANEL = 64;                     // outputs of a panel
constexpr int PANEL_VECTORS = PANEL / LANES;  // and the vectors of their sums

// Rows, and vectors of a panel, that are multiplied together: their sums, the weights and one row's
// broadcast pair fill the registers.
constexpr int TILE_ROWS = NUM_REGISTERS >= 32 ? 6 : 4;
constexpr int TILE_VECTORS = NUM_REGISTERS >= 32 ? PANEL_VECTORS : 1;

// How many sums an output may have at most, and how many of them, or of what they have been added up
// to, lie on a stack at a time.
constexpr int MAX_SUMS = 8;
constexpr int STACK_SIZE = 4;

// A tile's sums of a part of the inputs. They lie on a stack, above those of earlier parts that still
// wait for a right neighbour; all are [rows][PANEL].
struct PartialSums {
  float* const* top;
  int64_t offset;  // of the tile's first row
  bool is_begun;   // whether a chunk of the part is in them already
  int num_left;    // how many of those below get their right neighbour when this chunk is added

  PartialSums of_row(int64_t row) const { return {top, row * PANEL, is_begun, num_left}; }

  // tile: this tile's vectors from `first` on.
  template <int ROWS>
  PDS_INLINE void load_to(F32 (&tile)[ROWS][TILE_VECTORS], int first) const {
    for (int row = 0; row < ROWS; ++row)
      for (int v = 0; v < TILE_VECTORS; ++v)
        tile[row][v] = is_begun ? load(at(0, row, first + v)) : zero();
  }
  // Brings the tile's vectors back into L1, from which the weight has pushed them, one in each of the
  // last steps: many stores in a row that miss it would hold up reading the weight.
  template <int ROWS>
  PDS_INLINE void fetch(int first, int64_t steps_left) const {
    if (steps_left >= ROWS * TILE_VECTORS) return;
    const float* vector = at(num_left, steps_left / TILE_VECTORS, first + steps_left % TILE_VECTORS);
    _mm_prefetch(reinterpret_cast<const char*>(vector), _MM_HINT_T0);
  }
  template <int ROWS>
  PDS_INLINE void store_from(F32 (&tile)[ROWS][TILE_VECTORS], int first) const {
    for (int below = 1; below <= num_left; ++below)
      for (int row = 0; row < ROWS; ++row)
        for (int v = 0; v < TILE_VECTORS; ++v)
          tile[row][v] = add(load(at(below, row, first + v)), tile[row][v]);
    for (int row = 0; row < ROWS; ++row)
      for (int v = 0; v < TILE_VECTORS; ++v) store(at(num_left, row, first + v), tile[row][v]);
  }

 private:
  PDS_INLINE float* at(int below, int row, int v) const {
    return top[-below] + offset + row * PANEL + v * LANES;
  }
};

// What integers are multiplied with: weight = (integer - zero) * scale, for groups of inputs.
struct IntegerScales {
  const void* scales;    // [panels][groups][64], fp32 or bf16
  const uint8_t* zeros;  // int8 [panels][groups][64][2], each twice, as int4 plus 8; null: all 0
  int64_t group_size;    // even; a panel's last group may have less
  int64_t has_fp32_scales;
};

// A weight [n, k] as panels [num_parts][ceil(n / num_parts / 64)][k / 2], zeros where there are no
// outputs. It has two parts, each of n / 2 outputs, if it is a gate and an up projection in one.
// For every two inputs a panel has:
//   16 bits: bf16 [64][2];
//   8 bits: int8 [64][2];
//   4 bits: [32] words of 16 bits. Word j has the j-th number, plus 8, of each quarter of [64][2],
//   the first quarter's in its lowest bits.
struct PackedLinear {
  const void* panels;
  const bf16* bias;  // [n], or null
  int64_t n, k;      // k is even: an odd one is padded with a zero, as x must be
  int64_t num_parts = 1;
  int64_t num_sums = 1;  // equal, even parts of the inputs: a power of two up to MAX_SUMS
  int64_t bits = 16;
  IntegerScales integers = {};

  int64_t part_outputs() const { return n / num_parts; }
  int64_t part_panels() const { return (part_outputs() + PANEL - 1) / PANEL; }
  int64_t num_panels() const { return num_parts * part_panels(); }
  const uint8_t* panel(int64_t index) const {
    return static_cast<const uint8_t*>(panels) + index * PANEL * k * bits / 8;
  }
  // The first output of a panel, and how many it has.
  int64_t first_output(int64_t panel) const {
    return panel / part_panels() * part_outputs() + panel % part_panels() * PANEL;
  }
  int64_t num_outputs(int64_t panel) const {
    return std::min<int64_t>(PANEL, part_outputs() - panel % part_panels() * PANEL);
  }
};

}  // namespace pds
