#include "layers.h"

#include <algorithm>
#include <cmath>

#include "math.h"

namespace pds {
namespace {

PDS_INLINE float sum_of_squares(const bf16* x, int64_t size) {
  constexpr int CHAINS = 4;
  F32 sums[CHAINS] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + CHAINS * LANES <= size; i += CHAINS * LANES)
    for (int chain = 0; chain < CHAINS; chain++) {
      F32 part = load_bf16(x + i + chain * LANES);
      sums[chain] = fma(part, part, sums[chain]);
    }
  for (; i < size; i += LANES) {
    F32 part = load_bf16(x + i, size - i);
    sums[0] = fma(part, part, sums[0]);
  }
  return sum_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

// Divided by its root mean square, rounded, times weight; out may be x.
PDS_INLINE void normalize(const bf16* x, int64_t size, const bf16* weight, float eps, bf16* out) {
  float mean = sum_of_squares(x, size) / static_cast<float>(size);
  F32 factor = set1(1.0f / std::sqrt(mean + eps));
  for (int64_t i = 0; i < size; i += LANES) {
    F32 normed = rounded_to_bf16(mul(load_bf16(x + i, size - i), factor));
    store_bf16(out + i, mul(normed, load_bf16(weight + i, size - i)), size - i);
  }
}

PDS_INLINE void add_to(bf16* residual, const bf16* x, int64_t size) {
  for (int64_t i = 0; i < size; i += LANES) {
    F32 sum = add(load_bf16(residual + i, size - i), load_bf16(x + i, size - i));
    store_bf16(residual + i, sum, size - i);
  }
}

PDS_INLINE void rotate(bf16* x, const float* cos, int64_t half) {
  const float* sin = cos + half;
  for (int64_t i = 0; i < half; i += LANES) {
    int64_t left = half - i;
    F32 first = load_bf16(x + i, left), second = load_bf16(x + half + i, left);
    F32 c = load(cos + i, left), s = load(sin + i, left);
    store_bf16(x + i, fma(first, c, sub(zero(), mul(second, s))), left);
    store_bf16(x + half + i, fma(second, c, mul(first, s)), left);
  }
}

PDS_INLINE void write_key(bf16* tile, const bf16* key, int64_t offset, int64_t head_dim) {
  bf16* column = tile + offset / LANES * LANES * head_dim + offset % LANES * 2;
  for (int64_t pair = 0; pair < head_dim / 2; pair++)
    std::memcpy(column + pair * 2 * LANES, key + 2 * pair, 2 * sizeof(bf16));
}

// One number at a time: the other of a pair may be another thread's.
PDS_INLINE void write_value(bf16* tile, const bf16* value, int64_t offset, int64_t head_dim) {
  bf16* row = tile + offset / 2 * 2 * head_dim + offset % 2;
  for (int64_t i = 0; i < head_dim; i++) row[2 * i] = value[i];
}

PDS_INLINE void write_to_cache(const PagedKV& kv, int64_t layer, int64_t head, int64_t slot,
                               const bf16* key, const bf16* value) {
  if (slot < 0) return;
  int64_t block = slot / kv.block_size, offset = slot % kv.block_size;
  write_key(kv.key_tile(block, head, layer), key, offset, kv.head_dim);
  write_value(kv.value_tile(block, head, layer), value, offset, kv.head_dim);
}

}  // namespace

void rms_norm(const Team& team, const bf16* x, const Rows& rows, const bf16* weight, float eps,
              bf16* out) {
  Range share = team.share(rows.count());
  for (int64_t row = share.begin; row < share.end; row++)
    normalize(x + rows.offset(row), rows.size, weight, eps, out + row * rows.size);
}

void add_rms_norm(const Team& team, const bf16* x, bf16* residual, int64_t num_rows, int64_t size,
                  const bf16* weight, float eps, bf16* out) {
  Range share = team.share(num_rows);
  for (int64_t at = share.begin * size; at < share.end * size; at += size) {
    add_to(residual + at, x + at, size);
    if (weight == nullptr)
      std::copy_n(residual + at, size, out + at);
    else
      normalize(residual + at, size, weight, eps, out + at);
  }
}

void silu_and_mul(const Team& team, const bf16* x, int64_t stride, int64_t num_rows, int64_t width,
                  bf16* out) {
  Range share = team.share(num_rows);
  for (int64_t row = share.begin; row < share.end; row++) {
    const bf16 *gate = x + row * stride, *up = gate + width;
    for (int64_t i = 0; i < width; i += LANES) {
      F32 activated = rounded_to_bf16(silu(load_bf16(gate + i, width - i)));
      store_bf16(out + row * width + i, mul(activated, load_bf16(up + i, width - i)), width - i);
    }
  }
}

void rotary_embedding(const Team& team, const Rotary& rotary, const int64_t* positions, bf16* x,
                      const Rows& rows) {
  Range share = team.share(rows.count());
  for (int64_t row = share.begin; row < share.end; row++) {
    const float* cos_sin = rotary.cos_sin + positions[row / rows.inner] * rotary.rot_dim;
    rotate(x + rows.offset(row), cos_sin, rotary.rot_dim / 2);
  }
}

void reshape_and_cache(const Team& team, const bf16* key, const Rows& key_rows, const bf16* value,
                       const Rows& value_rows, const PagedKV& kv, int64_t layer,
                       const int64_t* slot_mapping) {
  Range share = team.share(key_rows.count());
  for (int64_t row = share.begin; row < share.end; row++)
    write_to_cache(kv, layer, row % kv.num_kv_heads, slot_mapping[row / kv.num_kv_heads],
                   key + key_rows.offset(row), value + value_rows.offset(row));
}

void qk_norm_rope_cache(const Team& team, bf16* qkv, int64_t num_tokens, const QkvHeads& heads,
                        const Rotary& rotary, const int64_t* positions, const PagedKV& kv,
                        int64_t layer, const int64_t* slot_mapping) {
  int64_t size = kv.head_dim, num_rotated = heads.num_heads + kv.num_kv_heads;
  int64_t width = (num_rotated + kv.num_kv_heads) * size;
  Range share = team.share(num_tokens * num_rotated);
  for (int64_t item = share.begin; item < share.end; item++) {
    int64_t token = item / num_rotated, head = item % num_rotated;
    bf16* row = qkv + token * width + head * size;
    bool is_key = head >= heads.num_heads;
    const bf16* norm = is_key ? heads.k_norm : heads.q_norm;
    if (norm != nullptr) normalize(row, size, norm, heads.eps, row);
    rotate(row, rotary.cos_sin + positions[token] * rotary.rot_dim, rotary.rot_dim / 2);
    if (is_key)
      write_to_cache(kv, layer, head - heads.num_heads, slot_mapping[token], row,
                     row + kv.num_kv_heads * size);
  }
}

}  // namespace pds

using namespace pds;

extern "C" {

void pds_rms_norm(const bf16* x, int64_t outer, int64_t inner, int64_t outer_stride,
                  int64_t inner_stride, int64_t size, const bf16* weight, float eps, bf16* out) {
  Rows rows{outer, inner, outer_stride, inner_stride, size};
  run_team([&](const Team& team) { rms_norm(team, x, rows, weight, eps, out); });
}

void pds_add_rms_norm(const bf16* x, bf16* residual, int64_t num_rows, int64_t size,
                      const bf16* weight, float eps, bf16* out) {
  run_team([&](const Team& team) {
    add_rms_norm(team, x, residual, num_rows, size, weight, eps, out);
  });
}

void pds_silu_and_mul(const bf16* x, int64_t stride, int64_t num_rows, int64_t width, bf16* out) {
  run_team([&](const Team& team) { silu_and_mul(team, x, stride, num_rows, width, out); });
}

void pds_rotary_embedding(const float* cos_sin, int64_t rot_dim, const int64_t* positions, bf16* x,
                          int64_t num_tokens, int64_t num_heads, int64_t token_stride,
                          int64_t head_stride) {
  Rotary rotary{cos_sin, rot_dim};
  Rows rows{num_tokens, num_heads, token_stride, head_stride, rot_dim};
  run_team([&](const Team& team) { rotary_embedding(team, rotary, positions, x, rows); });
}

void pds_reshape_and_cache(const bf16* key, int64_t key_token_stride, int64_t key_head_stride,
                           const bf16* value, int64_t value_token_stride, int64_t value_head_stride,
                           int64_t num_tokens, const PagedKV* kv, int64_t layer,
                           const int64_t* slot_mapping) {
  Rows keys{num_tokens, kv->num_kv_heads, key_token_stride, key_head_stride, kv->head_dim};
  Rows values{num_tokens, kv->num_kv_heads, value_token_stride, value_head_stride, kv->head_dim};
  run_team([&](const Team& team) {
    reshape_and_cache(team, key, keys, value, values, *kv, layer, slot_mapping);
  });
}

}  // extern "C"
