// A panel of small integers with a scale for each group of inputs: weight-only quantization.
//
// integer - zero is exact in bf16, so the sum of a group is a chain of `dot_pairs` over ascending k as
// for bf16 weights; sums are multiplied by their scales and added in fp32, groups ascending. A row's
// bits depend on nothing else. Every tile of rows turns the integers into bf16 for itself: that runs
// beside the products, while bf16 written to memory would have to be read again.
#pragma once

#include "packed_linear.h"
#include "team.h"

namespace pds {

// sums = x [rows, k] @ panel^T of some inputs, for a weight of 4 or 8 bits. Where they
// begin or end within a group, the part of the group gets the group's scale.
void multiply_int_panel(const bf16* x, int64_t rows, const PackedLinear& weight, int64_t panel,
                        Range inputs, const PartialSums& sums);

}  // namespace pds
