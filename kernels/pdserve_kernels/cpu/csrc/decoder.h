// All layers of a model for one step, in one parallel region.
#pragma once

#include "group.h"
#include "layers.h"
#include "linear.h"
#include "moe.h"
#include "paged_kv.h"
#include "team.h"

namespace pds {

struct DecoderLayer {
  const bf16* input_norm;  // [hidden_size]
  PackedLinear qkv;
  const bf16* q_norm;  // [head_dim], or null
  const bf16* k_norm;
  PackedLinear attention_output;
  const bf16* post_attention_norm;
  PackedLinear gate_up;  // in two parts
  PackedLinear down;
  const Moe* moe;  // in place of gate_up and down, or null; those of all layers have one shape
  // Which of the step's batches it reads, the slot of its KV in a block, and its window (0: none).
  int64_t group, slot, window;
};

struct Decoder {
  const DecoderLayer* layers;
  int64_t num_layers;
  const bf16* final_norm;  // or null: out is the residual, which layers elsewhere go on with
  int64_t hidden_size, intermediate_size, num_heads;  // the MLP's size, 0 if no layer has one
  float eps, scale;
  Rotary rotary;
  // The ranks that have the rest of the heads and of the MLP, each with slots for a row at least; null:
  // there are none.
  Group* group;
};

struct Step {
  PagedKV kv;
  const Batch* batches;  // one for each KV group
  int64_t num_groups, num_tokens;
  const int64_t* positions;  // [num_tokens]
  // Of the tokens that have adapters, ascending, and the most ranks that one has in a weight. A slot
  // of the decoder's group takes as many more numbers than a row has.
  const LoraSegment* segments;
  int64_t num_segments, row_ranks;
};

// How many bytes of workspace a step needs with so many threads.
int64_t decoder_workspace_size(const Decoder& decoder, const Step& step, int64_t num_threads);

// Adds each layer's attention and MLP to hidden_states [num_tokens, hidden_size] and writes their norm
// to out. The workspace is aligned to 64 bytes. If another rank does not come, out is not written and
// the group has failed.
void run_decoder(const Team& team, const Decoder& decoder, const Step& step,
                 const bf16* hidden_states, bf16* out, void* workspace);

}  // namespace pds
