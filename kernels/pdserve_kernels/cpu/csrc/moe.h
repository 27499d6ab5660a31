// The MLP of a layer with experts: a router chooses some for each row, and what they bring is added up
// with its weights.
//
// Rows are sorted by experts, so that an expert's weights are read once for all its rows, and those of
// no row not at all. A row's experts are added up in the order of their ids, and after them the one that
// all rows share, each output by one thread: its bits depend on the row alone, however many rows or
// threads there are.
#pragma once

#include "carver.h"
#include "packed_linear.h"
#include "team.h"

namespace pds {

struct SharedExpert {
  PackedLinear gate_up;  // in two parts
  PackedLinear down;
};

struct Moe {
  PackedLinear router;          // an output for each expert, and one for the gate of a shared one
  const PackedLinear* gate_up;  // [num_experts], each in two parts
  const PackedLinear* down;     // [num_experts]
  const SharedExpert* shared;   // or null
  int64_t top_k;
  int64_t renormalize;  // whether a row's weights add up to 1

  int64_t num_experts() const { return router.n - (shared == nullptr ? 0 : 1); }
  int64_t hidden_size() const { return router.k; }
  int64_t intermediate_size() const { return down[0].k; }
};

// What the threads share. A pair is a row and one of its experts.
struct MoeWorkspace {
  bf16* logits;            // [m, router.n]
  int32_t* ids;            // [m, top_k], ascending in a row
  float* weights;          // [m, top_k]
  int32_t* first_pairs;    // [num_experts + 1]: where an expert's pairs begin
  int32_t* sorted;         // [m * top_k]: row * top_k + place, by experts and then rows
  bf16* gathered;          // [m * top_k, hidden_size], sorted
  bf16* activated;         // [m * top_k, intermediate_size], sorted
  float* totals;           // [panels of out][m][PANEL]
  float* shared_weights;   // [m], of the shared expert
  bf16* shared_activated;  // [m, its size]

  MoeWorkspace(Carver& carver, const Moe& moe, int64_t m);
};

// out [m, hidden_size] = for each row of x the sum of its experts' MLPs times their weights. A barrier
// has to lie before it where other threads have written x, and one behind it where they read out.
void fused_moe(const Team& team, const Moe& moe, const bf16* x, int64_t m,
               const MoeWorkspace& workspace, bf16* out);

}  // namespace pds
