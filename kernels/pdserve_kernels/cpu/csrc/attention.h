// Causal attention of a batch over the paged cache, decodes and prefill chunks alike.
//
// A row is one head of one query token. Its positions are cut at multiples of SPAN; within a span
// its arithmetic is one chain per score, one maximum, and one chain per output over ascending
// positions; spans are merged in ascending order (the online softmax of FlashAttention,
// arXiv:2205.14135). So a row's bits depend on the row and its request's cache only.
#pragma once

#include "paged_kv.h"
#include "team.h"

namespace pds {

// Positions whose scores share one maximum; part of the numerics.
constexpr int64_t SPAN = 512;

// How many floats of scratch a call needs, over all threads.
int64_t attention_scratch_size(int64_t num_threads, int64_t num_heads, const PagedKV& kv,
                               const Batch& batch);

// query: rows of num_heads * head_dim, `query_stride` apart; out: the same rows, contiguous, with
// zeros in padding rows. With window > 0 a token at position p sees (p - window, p]; softcap > 0
// makes a score s softcap * tanh(s / softcap). What lies past a request's end, in blocks before the
// window of its first query, or in the table's padding is not used. The caller puts barriers before
// and after.
void paged_attention(const Team& team, const bf16* query, int64_t query_stride, int64_t num_heads,
                     const PagedKV& kv, int64_t layer, const Batch& batch, float scale,
                     int64_t window, float softcap, bf16* out, float* scratch);

}  // namespace pds
