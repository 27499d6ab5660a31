// The paged KV cache in packed tiles and the batch that reads and writes it, as the kernels see them.
#pragma once

#include <cstdint>

#include "isa.h"

namespace pds {

// bf16 [num_blocks, num_kv_heads, num_layers, 2 (K, V), block_size * head_dim]; block_size and
// head_dim are multiples of LANES. In a tile, groups of LANES positions follow one another:
// K [block_size / LANES][head_dim / 2][LANES positions][2 dims],
// V [block_size / 2][head_dim][2 positions].
struct PagedKV {
  bf16* cache;
  int64_t num_kv_heads, num_layers, block_size, head_dim;

  int64_t tile_size() const { return block_size * head_dim; }
  int64_t group_size() const { return LANES * head_dim; }
  bf16* key_tile(int64_t block, int64_t head, int64_t layer) const {
    return cache + ((block * num_kv_heads + head) * num_layers + layer) * 2 * tile_size();
  }
  bf16* value_tile(int64_t block, int64_t head, int64_t layer) const {
    return key_tile(block, head, layer) + tile_size();
  }
};

// Requests whose query tokens lie one after another (pdserve_kernels.metadata has the contract).
// `num_tokens` counts padding rows behind the last request's as well.
struct Batch {
  int64_t num_reqs, num_tokens;
  const int32_t* query_start_loc;  // [num_reqs + 1]
  const int32_t* seq_lens;         // [num_reqs]
  const int32_t* block_table;      // [num_reqs, block_table_stride]
  int64_t block_table_stride;
  const int64_t* slot_mapping;  // [num_tokens], -1 for padding; attention does not read it
};

}  // namespace pds
