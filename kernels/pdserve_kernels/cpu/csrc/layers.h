// What lies between the matrix products of a decoder layer: norms, rotary embedding, activation, and
// writing keys and values into the cache. All of it works row by row, and a row's bits depend on
// nothing else: neither on how rows are shared among threads nor on whether operations are fused.
#pragma once

#include "isa.h"
#include "paged_kv.h"
#include "team.h"

namespace pds {

// Rows of `size` numbers: `inner` of them at `inner_stride` from each other, at each of `outer` places.
struct Rows {
  int64_t outer, inner, outer_stride, inner_stride, size;

  int64_t count() const { return outer * inner; }
  int64_t offset(int64_t row) const {
    return row / inner * outer_stride + row % inner * inner_stride;
  }
};

// out = x / rms(x) * weight for each row of x; out is contiguous. x / rms(x) is rounded to bf16 first.
void rms_norm(const Team& team, const bf16* x, const Rows& rows, const bf16* weight, float eps,
              bf16* out);

// residual += x, rounded; out = rms_norm(residual), or without a weight the residual. All are
// [num_rows, size]; out may be x.
void add_rms_norm(const Team& team, const bf16* x, bf16* residual, int64_t num_rows, int64_t size,
                  const bf16* weight, float eps, bf16* out);

// x [num_rows, 2 * width] with its own stride -> silu(first half) * second half; silu is rounded first.
void silu_and_mul(const Team& team, const bf16* x, int64_t stride, int64_t num_rows, int64_t width,
                  bf16* out);

// Cosines and sines of every position: [max_position, rot_dim] = [cos | sin] in fp32.
struct Rotary {
  const float* cos_sin;
  int64_t rot_dim;
};

// Rotates rows, of which `inner` belong to each position, in place: of the first rot_dim numbers, i
// is paired with i + rot_dim / 2.
void rotary_embedding(const Team& team, const Rotary& rotary, const int64_t* positions, bf16* x,
                      const Rows& rows);

// Writes keys and values [num_tokens, num_kv_heads, head_dim] of one layer to their slots, block *
// block_size + offset; a negative slot is padding.
void reshape_and_cache(const Team& team, const bf16* key, const Rows& key_rows, const bf16* value,
                       const Rows& value_rows, const PagedKV& kv, int64_t layer,
                       const int64_t* slot_mapping);

// The heads of qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], queries first; norms are
// null where the model has none.
struct QkvHeads {
  int64_t num_heads;
  const bf16* q_norm;
  const bf16* k_norm;
  float eps;
};

// What attention needs of qkv, in one pass: queries and keys are normed and rotated in place, keys and
// values written to the cache.
void qk_norm_rope_cache(const Team& team, bf16* qkv, int64_t num_tokens, const QkvHeads& heads,
                        const Rotary& rotary, const int64_t* positions, const PagedKV& kv,
                        int64_t layer, const int64_t* slot_mapping);

}  // namespace pds
