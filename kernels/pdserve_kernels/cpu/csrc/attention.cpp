#include "attention.h"

#include <cmath>
#include <type_traits>

#include "math.h"

namespace pds {
namespace {

constexpr int64_t SPAN_GROUPS = SPAN / LANES;
// Rows that go through a span together, in strips whose sums fill the register file.
constexpr int64_t WORK_ROWS = 48;
constexpr int STRIP_ROWS = NUM_REGISTERS >= 32 ? 6 : 2;
constexpr int STRIP_VECTORS = NUM_REGISTERS >= 32 ? 4 : 2;
// Groups of V whose part for one strip stays in the L1 cache while all strips go over it.
constexpr int64_t VALUE_STEP = 8;
// Up to so many rows it is memory that takes the time; more of them wait for arithmetic.
constexpr int64_t MAX_STREAMING_ROWS = WORK_ROWS / 2;
// How many groups before it is read a group is prefetched.
constexpr int64_t AHEAD = 8;
constexpr float NOTHING = -INFINITY;
constexpr float LOG2_E = 1.44269504088896341f;

int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// Calls f(std::integral_constant<int, n>()) for an n in [1, MAX] that only run time knows.
template <int MAX, typename F>
PDS_INLINE void with_constant(int64_t n, const F& f) {
  if constexpr (MAX > 1) {
    if (n < MAX) return with_constant<MAX - 1>(n, f);
  }
  f(std::integral_constant<int, MAX>());
}

// How many vectors a strip goes over at once.
constexpr int max_vectors(int64_t num_rows) {
  return num_rows <= STRIP_ROWS / 2 ? 2 * STRIP_VECTORS : STRIP_VECTORS;
}

// Calls f(rows, vectors), constants, for the strip that takes what it can of both.
template <typename F>
PDS_INLINE void with_strip(int64_t num_rows, int64_t num_vectors, const F& f) {
  with_constant<STRIP_ROWS>(num_rows, [&](auto rows) {
    with_constant<max_vectors(rows())>(num_vectors, [&](auto vectors) { f(rows, vectors); });
  });
}

// What all threads of a call share.
struct Attention {
  const bf16* query;
  int64_t query_stride, num_heads;
  const PagedKV& kv;
  int64_t layer;
  const Batch& batch;
  float scale;
  int64_t window;
  float softcap;
  bf16* out;
  float* partials;

  int64_t query_len(int64_t request) const {
    return batch.query_start_loc[request + 1] - batch.query_start_loc[request];
  }
  // A request's rows are (token, head of the group), for each KV head.
  int64_t group_size() const { return num_heads / kv.num_kv_heads; }
  int64_t num_rows(int64_t request) const { return query_len(request) * group_size(); }
  // Where a row is among the batch's (token, head).
  int64_t batch_row(int64_t request, int64_t kv_head, int64_t row) const {
    int64_t token = batch.query_start_loc[request] + row / group_size();
    return token * num_heads + kv_head * group_size() + row % group_size();
  }
};

// Where each row's attention stands: head_dim sums of p * V, the maximum of its scores and the sum
// of its p. Here p = 2^(score - maximum), rounded to bf16 in both sums: so V's weights add up to 1.
// A row that has seen nothing has the maximum NOTHING and zeros.
struct States {
  float* base;
  int64_t head_dim;

  static int64_t stride(int64_t head_dim) { return head_dim + LANES; }
  float* output(int64_t row) const { return base + row * stride(head_dim); }
  float& maximum(int64_t row) const { return output(row)[head_dim]; }
  float& sum(int64_t row) const { return output(row)[head_dim + 1]; }
};

// Rows [first_row, first_row + num_rows) of a request and KV head, over spans [first_span,
// end_span). The result goes to `partial` if other works have other spans, else to the output.
struct Work {
  int64_t request, head, first_row, num_rows, first_span, end_span;
  float* partial;
};

// Positions of a request.
struct Seen {
  int64_t begin, end;
};

Seen seen_by_row(const Attention& a, int64_t request, int64_t row) {
  int64_t end = a.batch.seq_lens[request] - a.query_len(request) + row / a.group_size() + 1;
  return {a.window > 0 ? std::max<int64_t>(0, end - a.window) : 0, end};
}

// What the work's rows see of its spans [first, end), all together.
Seen seen_in_spans(const Attention& a, const Work& work, int64_t first, int64_t end) {
  Seen top = seen_by_row(a, work.request, work.first_row);
  Seen bottom = seen_by_row(a, work.request, work.first_row + work.num_rows - 1);
  return {std::max(top.begin, first * SPAN), std::min(bottom.end, end * SPAN)};
}

// The rows from `first_row` on that fit into a tile, over all spans they see.
Work tile_of_rows(const Attention& a, int64_t request, int64_t head, int64_t first_row) {
  int64_t count = std::min(WORK_ROWS, a.num_rows(request) - first_row);
  int64_t begin = seen_by_row(a, request, first_row).begin;
  int64_t end = seen_by_row(a, request, first_row + count - 1).end;
  return {request, head, first_row, count, begin / SPAN, round_up(end, SPAN) / SPAN, nullptr};
}

// A request of few rows, a decode for instance, is shared out by its spans; their results are
// merged at last. Of one with more, each thread takes tiles and goes through their spans alone.
bool is_split(const Attention& a, const Work& tile) {
  return a.num_rows(tile.request) <= WORK_ROWS && tile.end_span - tile.first_span > 1;
}

int64_t partial_size(const Attention& a, const Work& tile) {
  return tile.num_rows * States::stride(a.kv.head_dim);
}

// Calls f for every tile of the first KV heads, always in the same order.
template <typename F>
void for_each_tile(const Attention& a, int64_t num_kv_heads, const F& f) {
  float* partial = a.partials;
  for (int64_t request = 0; request < a.batch.num_reqs; ++request) {
    for (int64_t head = 0; head < num_kv_heads; ++head) {
      for (int64_t row = 0; row < a.num_rows(request); row += WORK_ROWS) {
        Work tile = tile_of_rows(a, request, head, row);
        if (is_split(a, tile)) {
          tile.partial = partial;
          partial += (tile.end_span - tile.first_span) * partial_size(a, tile);
        }
        f(tile);
      }
    }
  }
}

template <typename F>
void for_each_work(const Attention& a, int64_t num_kv_heads, const F& f) {
  for_each_tile(a, num_kv_heads, [&](const Work& tile) {
    if (!tile.partial) return f(tile);
    Work work = tile;
    for (int64_t span = tile.first_span; span < tile.end_span; ++span) {
      work.first_span = span, work.end_span = span + 1;
      f(work);
      work.partial += partial_size(a, tile);
    }
  });
}

// In units of about the same time, whether memory (few rows) or arithmetic (many) takes it.
int64_t cost_of(const Attention& a, const Work& work) {
  Seen seen = seen_in_spans(a, work, work.first_span, work.end_span);
  return (seen.end - seen.begin + LANES) * round_up(work.num_rows, STRIP_ROWS);
}

// Calls f for this thread's works, which follow one another and cost what is its share, as nearly
// as whole works allow. With each comes the next one, or the last again.
template <typename F>
void for_own_work(const Attention& a, const Team& team, const F& f) {
  int64_t num_kv_heads = a.kv.num_kv_heads, total = 0, before = 0;
  for_each_work(a, 1, [&](const Work& work) { total += cost_of(a, work) * num_kv_heads; });
  Work waiting{};
  for_each_work(a, num_kv_heads, [&](const Work& work) {
    int64_t cost = cost_of(a, work);
    // Rank r has what lies between r and r + 1 times total / size; a work is at its middle.
    if ((before + cost / 2) * team.size / total == team.rank) {
      if (waiting.num_rows) f(waiting, work);
      waiting = work;
    }
    before += cost;
  });
  if (waiting.num_rows) f(waiting, waiting);
}

// What one thread works in.
struct Workspace {
  float* base;
  int64_t head_dim;

  static int64_t size(int64_t head_dim) {
    return WORK_ROWS * (SPAN + head_dim / 2 + 2 * States::stride(head_dim)) + LANES * head_dim / 2;
  }
  // [WORK_ROWS, SPAN]
  float* scores(int64_t row) const { return base + row * SPAN; }
  // In the place of the scores, each row's at their beginning.
  bf16* probabilities(int64_t row) const { return reinterpret_cast<bf16*>(scores(row)); }
  States merged() const { return {scores(WORK_ROWS), head_dim}; }
  States fresh() const { return {merged().output(WORK_ROWS), head_dim}; }
  // [WORK_ROWS, head_dim]
  bf16* query() const { return reinterpret_cast<bf16*>(fresh().output(WORK_ROWS)); }
  // One group of V.
  bf16* tail() const { return query() + WORK_ROWS * head_dim; }
};

// A work's rows over one span, and where K and V of all they see of it are: `count` groups, the
// first of which is group `first` of the span. Behind the keys are those that will be read next.
struct Part {
  const Work& work;
  int64_t span, first, count;
  const bf16* keys[SPAN_GROUPS + AHEAD];
  const bf16* values[SPAN_GROUPS];

  // The positions in the span that the groups hold.
  int64_t begin() const { return first * LANES; }
  int64_t end() const { return (first + count) * LANES; }
};

const bf16* key_group(const Attention& a, const Work& work, int64_t group) {
  auto index = static_cast<uint32_t>(group);  // 64 bits take longer to divide
  auto per_block = static_cast<uint32_t>(a.kv.block_size) / LANES;
  const int32_t* blocks = a.batch.block_table + work.request * a.batch.block_table_stride;
  return a.kv.key_tile(blocks[index / per_block], work.head, a.layer) +
         index % per_block * a.kv.group_size();
}

// Lists the groups of K that a work reads of a span, at most `limit`; returns how many.
int64_t list_keys(const Attention& a, const Work& work, int64_t span, int64_t limit,
                  const bf16** keys) {
  Seen seen = seen_in_spans(a, work, span, span + 1);
  int64_t first = seen.begin / LANES, end = round_up(seen.end, LANES) / LANES;
  int64_t count = std::min(limit, end - first);
  for (int64_t i = 0; i < count; ++i) keys[i] = key_group(a, work, first + i);
  return count;
}

Part make_part(const Attention& a, const Work& work, int64_t span, const Work& next,
               int64_t next_span) {
  int64_t first = seen_in_spans(a, work, span, span + 1).begin / LANES - span * SPAN_GROUPS;
  Part part{work, span, first, 0, {}, {}};
  part.count = list_keys(a, work, span, SPAN_GROUPS, part.keys);
  for (int64_t i = 0; i < part.count; ++i) part.values[i] = part.keys[i] + a.kv.tile_size();
  const bf16** behind = part.keys + part.count;
  int64_t listed = list_keys(a, next, next_span, AHEAD, behind);
  std::fill(behind + listed, behind + AHEAD, behind[listed - 1]);
  return part;
}

void load_query(const Attention& a, const Work& work, bf16* rows) {
  int64_t head_dim = a.kv.head_dim;
  for (int64_t i = 0; i < work.num_rows; ++i) {
    int64_t row = a.batch_row(work.request, work.head, work.first_row + i);
    const bf16* query = a.query + row / a.num_heads * a.query_stride + row % a.num_heads * head_dim;
    std::copy(query, query + head_dim, rows + i * head_dim);
  }
}

// sums[r][v] += the product of row r and vector v, over num_pairs; meanwhile(i) is called with each
// pair.
template <int ROWS, int VECTORS, typename Meanwhile>
PDS_INLINE void add_products(F32 (&sums)[ROWS][VECTORS], const bf16* rows, int64_t row_stride,
                             const bf16* const (&vectors)[VECTORS], int64_t pair_stride,
                             int64_t num_pairs, const Meanwhile& meanwhile) {
  for (int64_t i = 0; i < num_pairs; ++i) {
    Pairs b[VECTORS];
    for (int v = 0; v < VECTORS; ++v) b[v] = load_pairs(vectors[v] + i * pair_stride);
    meanwhile(i);
    for (int r = 0; r < ROWS; ++r) {
      Pairs pair = broadcast_pair(rows + r * row_stride + 2 * i);
      for (int v = 0; v < VECTORS; ++v) sums[r][v] = dot_pairs(sums[r][v], pair, b[v]);
    }
  }
}

// Brings V's line nearer that belongs to this one of K, and both lines of a group `ahead`. V is
// loaded here, not only prefetched, because the processor's own prefetchers follow loads, and reach
// the memory's rate only with several streams (pages) side by side; V's later use has one. `ahead`
// goes to the L2 cache: in L1 lines that are whole pages apart would displace what is in use.
PDS_INLINE void stream_line(const bf16* key, const bf16* ahead, int64_t tile_size) {
  _mm_prefetch(ahead, _MM_HINT_T1);
  _mm_prefetch(ahead + tile_size, _MM_HINT_T1);
  asm volatile("" : : "r"(key[tile_size]));
}

// Scores, times `factor`, of ROWS rows at VECTORS groups of positions.
template <bool STREAM, int ROWS, int VECTORS>
void score_strip(const bf16* query, const PagedKV& kv, const bf16* const* keys, float factor,
                 float* scores) {
  F32 sums[ROWS][VECTORS];
  const bf16 *vectors[VECTORS], *ahead[VECTORS];
  for (int v = 0; v < VECTORS; ++v) {
    vectors[v] = keys[v], ahead[v] = keys[v + AHEAD];
    for (int r = 0; r < ROWS; ++r) sums[r][v] = zero();
  }
  constexpr int64_t STRIDE = 2 * LANES;
  int64_t tile_size = kv.tile_size();
  auto stream = [&](int64_t i) {
    for (int v = 0; STREAM && v < VECTORS; ++v) {
      stream_line(vectors[v] + i * STRIDE, ahead[v] + i * STRIDE, tile_size);
    }
  };
  add_products(sums, query, kv.head_dim, vectors, STRIDE, kv.head_dim / 2, stream);
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < VECTORS; ++v) {
      store(scores + r * SPAN + v * LANES, mul(sums[r][v], set1(factor)));
    }
  }
}

// How many of the part's groups the strip of rows from `row` on sees, leading ones: the others' scores
// are never read, and their probabilities are 0.
int64_t num_seen(const Attention& a, const Part& part, int64_t row) {
  int64_t last = std::min(row + STRIP_ROWS, part.work.num_rows) - 1;
  int64_t end = seen_by_row(a, part.work.request, part.work.first_row + last).end;
  int64_t seen = round_up(end - part.span * SPAN - part.begin(), LANES) / LANES;
  return std::clamp<int64_t>(seen, 0, part.count);
}

// All scores of the part's rows that count, times `factor`.
void score(const Attention& a, const Part& part, float factor, const Workspace& workspace) {
  int64_t num_rows = part.work.num_rows, step = max_vectors(num_rows);
  for (int64_t group = 0; group < part.count; group += step) {
    for (int64_t row = 0; row < num_rows; row += STRIP_ROWS) {
      bool is_streaming = row == 0 && num_rows <= MAX_STREAMING_ROWS;
      const bf16* query = workspace.query() + row * a.kv.head_dim;
      float* scores = workspace.scores(row) + part.begin() + group * LANES;
      int64_t count = std::min(step, num_seen(a, part, row) - group);
      if (count <= 0) continue;
      with_strip(num_rows - row, count, [&](auto rows, auto vectors) {
        auto strip = is_streaming ? score_strip<true, rows(), vectors()>
                                  : score_strip<false, rows(), vectors()>;
        strip(query, a.kv, part.keys + group, factor, scores);
      });
    }
  }
}

// Scores times 2 / softcap become softcap * tanh(score / softcap), times log2(e).
void cap(float* scores, int64_t count, float softcap) {
  F32 one = set1(1.0f), limit = set1(softcap * LOG2_E);
  for (int64_t i = 0; i < count; i += LANES) {
    // From 20 on, tanh is 1 in fp32.
    F32 e = exp2(min(set1(20.0f * LOG2_E), load(scores + i)));
    store(scores + i, mul(limit, div(sub(e, one), add(e, one))));
  }
}

// Turns `count` scores, a multiple of 2 * LANES, into probabilities; a row's maximum and sum.
void exponentiate(float* scores, int64_t count, bf16* probabilities, float& maximum, float& sum) {
  F32 highest = set1(NOTHING), sums = zero();
  for (int64_t i = 0; i < count; i += LANES) highest = max(highest, load(scores + i));
  maximum = max_lanes(highest);
  // Where everything is hidden, -inf - -inf would be NaN.
  F32 base = set1(maximum == NOTHING ? 0.0f : maximum);
  Pairs ones = round_to_pairs(set1(1.0f), set1(1.0f));
  for (int64_t i = 0; i < count; i += 2 * LANES) {
    F32 low = exp2(sub(load(scores + i), base));
    F32 high = exp2(sub(load(scores + i + LANES), base));
    Pairs pairs = round_to_pairs(low, high);
    store_pairs(probabilities + i, pairs);
    sums = dot_pairs(sums, pairs, ones);
  }
  sum = sum_lanes(sums);
}

void softmax(const Attention& a, const Part& part, const Workspace& workspace,
             const States& states) {
  // Whole pairs of groups, in the same places of the span however many of them the part has.
  int64_t begin = part.first / 2 * 2 * LANES, end = round_up(part.end(), 2 * LANES);
  for (int64_t row = 0; row < part.work.num_rows; ++row) {
    float* scores = workspace.scores(row);
    if (a.softcap > 0) cap(scores + part.begin(), part.count * LANES, a.softcap);
    Seen seen = seen_by_row(a, part.work.request, part.work.first_row + row);
    int64_t from = std::clamp(seen.begin - part.span * SPAN, begin, end);
    int64_t to = std::clamp(seen.end - part.span * SPAN, from, end);
    std::fill(scores + begin, scores + from, NOTHING);
    std::fill(scores + to, scores + end, NOTHING);
    exponentiate(scores + begin, end - begin, workspace.probabilities(row) + begin,
                 states.maximum(row), states.sum(row));
  }
}

// Copies a group of V of which `count` positions are the request's, with zeros for the others.
void copy_tail(const bf16* group, int64_t count, int64_t head_dim, bf16* tail) {
  int64_t whole = count / 2 * 2 * head_dim;
  std::copy(group, group + whole, tail);
  std::fill(tail + whole, tail + LANES * head_dim, bf16{0});
  if (count % 2) {
    for (int64_t i = whole; i < whole + 2 * head_dim; i += 2) tail[i] = group[i];
  }
}

// Past the request's end V may hold anything, and 0 * NaN is NaN.
void hide_stale_values(const Attention& a, Part& part, bf16* tail) {
  int64_t stale = part.span * SPAN + part.end() - a.batch.seq_lens[part.work.request];
  if (stale <= 0) return;
  const bf16*& last = part.values[part.count - 1];
  copy_tail(last, LANES - stale, a.kv.head_dim, tail);
  last = tail;
}

// Adds p * V of ROWS rows, VECTORS * LANES dims from `dim` on and `count` groups to `output`.
template <int ROWS, int VECTORS>
void sum_strip(const bf16* probabilities, const bf16* const* values, int64_t count, int64_t dim,
               int64_t head_dim, bool is_first, float* output) {
  int64_t stride = States::stride(head_dim);
  F32 sums[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < VECTORS; ++v) {
      sums[r][v] = is_first ? zero() : load(output + r * stride + v * LANES);
    }
  }
  for (int64_t group = 0; group < count; ++group) {
    const bf16* vectors[VECTORS];
    for (int v = 0; v < VECTORS; ++v) vectors[v] = values[group] + 2 * (dim + v * LANES);
    add_products(sums, probabilities + group * LANES, 2 * SPAN, vectors, 2 * head_dim, LANES / 2,
                 [](int64_t) {});
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < VECTORS; ++v) store(output + r * stride + v * LANES, sums[r][v]);
  }
}

// The products of all the part's probabilities with V.
void sum_values(const Attention& a, const Part& part, const Workspace& workspace, const States& states) {
  int64_t head_dim = workspace.head_dim, num_rows = part.work.num_rows;
  int64_t step = max_vectors(num_rows);
  for (int64_t group = 0; group < part.count; group += VALUE_STEP) {
    for (int64_t dim = 0; dim < head_dim; dim += step * LANES) {
      int64_t num_vectors = std::min(step, (head_dim - dim) / LANES);
      for (int64_t row = 0; row < num_rows; row += STRIP_ROWS) {
        int64_t count = std::min(VALUE_STEP, num_seen(a, part, row) - group);
        if (count <= 0 && group > 0) continue;
        const bf16* probabilities = workspace.probabilities(row) + part.begin() + group * LANES;
        with_strip(num_rows - row, num_vectors, [&](auto rows, auto vectors) {
          sum_strip<rows(), vectors()>(probabilities, part.values + group, count, dim, head_dim,
                                       group == 0, states.output(row) + dim);
        });
      }
    }
  }
}

void attend_part(const Attention& a, Part part, const Workspace& workspace, const States& states) {
  float factor = a.softcap > 0 ? a.scale * 2.0f * LOG2_E / a.softcap : a.scale * LOG2_E;
  score(a, part, factor, workspace);
  softmax(a, part, workspace, states);
  hide_stale_values(a, part, workspace.tail());
  sum_values(a, part, workspace, states);
}

// Merges what the rows saw of the next span into what they saw of those before.
void merge(const States& states, const States& next, int64_t num_rows) {
  static_assert(WORK_ROWS % LANES == 0);
  float old_shares[WORK_ROWS] = {}, new_shares[WORK_ROWS] = {};
  for (int64_t row = 0; row < num_rows; ++row) {
    float maximum = std::max(states.maximum(row), next.maximum(row));
    old_shares[row] = states.maximum(row) - maximum;
    new_shares[row] = next.maximum(row) - maximum;
  }
  for (int64_t row = 0; row < num_rows; row += LANES) {
    store(old_shares + row, exp2(load(old_shares + row)));
    store(new_shares + row, exp2(load(new_shares + row)));
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    if (next.sum(row) == 0) continue;  // not by its maximum, in which NaN may be lost
    float old_share = old_shares[row], new_share = new_shares[row];
    float* output = states.output(row);
    for (int64_t i = 0; i < states.head_dim; i += LANES) {
      F32 old = mul(load(output + i), set1(old_share));
      store(output + i, fma(load(next.output(row) + i), set1(new_share), old));
    }
    states.maximum(row) = std::max(states.maximum(row), next.maximum(row));
    states.sum(row) = std::fma(next.sum(row), new_share, states.sum(row) * old_share);
  }
}

void write_output(const Attention& a, const Work& work, const States& states) {
  for (int64_t i = 0; i < work.num_rows; ++i) {
    int64_t row = a.batch_row(work.request, work.head, work.first_row + i);
    bf16* out = a.out + row * a.kv.head_dim;
    F32 inverse = set1(1.0f / states.sum(i));
    for (int64_t d = 0; d < a.kv.head_dim; d += LANES) {
      store_bf16(out + d, mul(load(states.output(i) + d), inverse));
    }
  }
}

void attend(const Attention& a, const Work& work, const Work& next, const Workspace& workspace) {
  load_query(a, work, workspace.query());
  States merged = work.partial ? States{work.partial, a.kv.head_dim} : workspace.merged();
  for (int64_t span = work.first_span; span < work.end_span; ++span) {
    bool is_first = span == work.first_span, is_last = span + 1 == work.end_span;
    Part part = is_last ? make_part(a, work, span, next, next.first_span)
                        : make_part(a, work, span, work, span + 1);
    attend_part(a, part, workspace, is_first ? merged : workspace.fresh());
    if (!is_first) merge(merged, workspace.fresh(), work.num_rows);
  }
  if (!work.partial) write_output(a, work, merged);
}

void merge_partials(const Attention& a, const Work& tile) {
  States merged{tile.partial, a.kv.head_dim};
  for (int64_t i = 1; i < tile.end_span - tile.first_span; ++i) {
    merge(merged, {tile.partial + i * partial_size(a, tile), a.kv.head_dim}, tile.num_rows);
  }
  write_output(a, tile, merged);
}

void merge_all_partials(const Attention& a, const Team& team) {
  bool any = false;
  for_each_tile(a, 1, [&](const Work& tile) { any |= tile.partial != nullptr; });
  if (!any) return;
  team.barrier();
  int64_t count = 0;
  for_each_tile(a, a.kv.num_kv_heads, [&](const Work& tile) {
    if (tile.partial && count++ % team.size == team.rank) merge_partials(a, tile);
  });
}

void clear_padding(const Attention& a, const Team& team) {
  int64_t first = a.batch.query_start_loc[a.batch.num_reqs], width = a.num_heads * a.kv.head_dim;
  Range rows = team.share(a.batch.num_tokens - first);
  std::fill(a.out + (first + rows.begin) * width, a.out + (first + rows.end) * width, bf16{0});
}

}  // namespace

int64_t attention_scratch_size(int64_t num_threads, int64_t num_heads, const PagedKV& kv,
                               const Batch& batch) {
  int64_t size = num_threads * Workspace::size(kv.head_dim), rows_of_heads = 0;
  for (int64_t request = 0; request < batch.num_reqs; ++request) {
    int64_t query_len = batch.query_start_loc[request + 1] - batch.query_start_loc[request];
    int64_t num_rows = query_len * num_heads / kv.num_kv_heads;
    if (num_rows > WORK_ROWS) continue;
    rows_of_heads += num_rows * kv.num_kv_heads * (round_up(batch.seq_lens[request], SPAN) / SPAN);
  }
  return size + rows_of_heads * States::stride(kv.head_dim);
}

void paged_attention(const Team& team, const bf16* query, int64_t query_stride, int64_t num_heads,
                     const PagedKV& kv, int64_t layer, const Batch& batch, float scale,
                     int64_t window, float softcap, bf16* out, float* scratch) {
  int64_t workspace_size = Workspace::size(kv.head_dim);
  Attention a{query, query_stride, num_heads, kv, layer, batch, scale, window, softcap, out,
              scratch + team.size * workspace_size};
  Workspace workspace{scratch + team.rank * workspace_size, kv.head_dim};
  clear_padding(a, team);
  for_own_work(a, team, [&](const Work& work, const Work& next) {
    attend(a, work, next, workspace);
  });
  merge_all_partials(a, team);
}

}  // namespace pds

extern "C" {

void pds_attention_scratch_size(int64_t num_heads, const pds::PagedKV* kv, const pds::Batch* batch,
                                int64_t* size) {
  *size = pds::attention_scratch_size(omp_get_max_threads(), num_heads, *kv, *batch);
}

void pds_paged_attention(const pds::bf16* query, int64_t query_stride, int64_t num_heads,
                         const pds::PagedKV* kv, int64_t layer, const pds::Batch* batch,
                         float scale, int64_t window, float softcap, pds::bf16* out,
                         float* scratch) {
  pds::run_team([&](const pds::Team& team) {
    pds::paged_attention(team, query, query_stride, num_heads, *kv, layer, *batch, scale, window,
                         softcap, out, scratch);
  });
}
}
