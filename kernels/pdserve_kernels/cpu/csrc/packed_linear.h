// How the weight of a dense layer lies in memory.
#pragma once

#include <algorithm>

#include "isa.h"

namespace pds {

constexpr int PANEL = 64;                     // outputs of a panel
constexpr int PANEL_VECTORS = PANEL / LANES;  // and the vectors of their sums

// Rows, and vectors of a panel, that are multiplied together: their sums, the weights and one row's
// broadcast pair fill the registers.
constexpr int TILE_ROWS = NUM_REGISTERS >= 32 ? 6 : 4;
constexpr int TILE_VECTORS = NUM_REGISTERS >= 32 ? PANEL_VECTORS : 1;

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
  int64_t num_sums = 1;  // what the inputs are added up in: 1, 2, 4 or 8 equal, even parts
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
