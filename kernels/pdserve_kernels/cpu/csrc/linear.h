// Dense layers on bf16 rows: out = x @ weight^T + bias, summed in fp32, for any number of rows.
//
// The weight lies in panels of 64 outputs, so that a thread streams it once, in order, and the sums
// of a tile of rows by 64 outputs stay in registers. Every sum is one chain of `dot_pairs` over
// ascending k, whatever the number of rows or threads and wherever the row lies: its bits depend on
// nothing else. A weight may ask for several sums, each of an equal part of the inputs. They are added
// as a binary tree, neighbours first, so that half of the inputs brings one half of the last addition,
// whoever computes it.
#pragma once

#include <xmmintrin.h>

#include "linear_int.h"
#include "lora.h"
#include "math.h"
#include "packed_linear.h"
#include "team.h"

namespace pds {

constexpr int64_t MAX_BLOCK_ROWS = 192;  // rows between two reads of the weight

namespace detail {

// All tiles of a block take a chunk of a panel (128 KiB) from L2 before the next chunk is touched.
constexpr int64_t CHUNK_PAIRS = 512;
constexpr int64_t STEP_PAIRS = 4;
constexpr int64_t STEP_LINES = STEP_PAIRS * PANEL * 2 * sizeof(bf16) / 64;

// What a tile brings into L2 while it computes: its part of the next chunk.
struct Prefetch {
  const char* next;
  int64_t lines_per_step;

  PDS_INLINE void step() {
    for (int64_t line = 0; line < lines_per_step; ++line, next += 64)
      _mm_prefetch(next, _MM_HINT_T1);
  }
};

// sums += x [ROWS, 2 * num_pairs] @ weight^T, for a chunk of a panel.
template <int ROWS>
__attribute__((noinline)) void add_products(const bf16* x, int64_t row_stride, const bf16* weight,
                                            int64_t num_pairs, Prefetch prefetch,
                                            PartialSums sums) {
  for (int first = 0; first < PANEL_VECTORS; first += TILE_VECTORS) {
    F32 tile[ROWS][TILE_VECTORS];
    sums.load_to(tile, first);
    auto add_pair = [&](int64_t pair) __attribute__((always_inline)) {
      Pairs w[TILE_VECTORS];
      for (int v = 0; v < TILE_VECTORS; ++v)
        w[v] = load_pairs(weight + (pair * PANEL + (first + v) * LANES) * 2);
      for (int row = 0; row < ROWS; ++row) {
        Pairs a = broadcast_pair(x + row * row_stride + 2 * pair);
        for (int v = 0; v < TILE_VECTORS; ++v) tile[row][v] = dot_pairs(tile[row][v], a, w[v]);
      }
    };
    int64_t pair = 0;
    for (; pair + STEP_PAIRS <= num_pairs; pair += STEP_PAIRS) {
      if (first == 0) prefetch.step();
      sums.fetch<ROWS>(first, (num_pairs - pair) / STEP_PAIRS - 1);
      for (int i = 0; i < STEP_PAIRS; ++i) add_pair(pair + i);
    }
    for (; pair < num_pairs; ++pair) add_pair(pair);
    sums.store_from(tile, first);
  }
}

template <int ROWS = TILE_ROWS, typename... Args>
PDS_INLINE void add_products_of(int64_t rows, Args... args) {
  if (rows == ROWS) return add_products<ROWS>(args...);
  if constexpr (ROWS > 1) add_products_of<ROWS - 1>(rows, args...);
}

// sums = x [rows, k] @ panel^T of some inputs, for a panel of bf16.
inline void multiply_bf16_panel(const bf16* x, int64_t rows, const bf16* panel, int64_t k,
                                Range inputs, const bf16* next, const PartialSums& sums) {
  const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  // A tile alone reads memory all the time; the hardware's prefetchers follow it best undisturbed.
  const int64_t lines_per_step = tiles == 1 ? 0 : (STEP_LINES + tiles - 1) / tiles;
  for (int64_t done = inputs.begin / 2; done < inputs.end / 2; done += CHUNK_PAIRS) {
    const int64_t pairs = std::min(CHUNK_PAIRS, inputs.end / 2 - done);
    const bf16* weight = panel + done * PANEL * 2;
    const bf16* after = done + pairs < k / 2 ? weight + pairs * PANEL * 2 : next;
    const bool is_last = 2 * (done + pairs) == inputs.end;
    const PartialSums chunk{sums.top, 0, done > inputs.begin / 2, is_last ? sums.num_left : 0};
    Prefetch prefetch{reinterpret_cast<const char*>(after), lines_per_step};
    for (int64_t tile = 0; tile < tiles; ++tile) {
      // Tiles of nearly equal height: low ones use the registers badly.
      const int64_t row = rows * tile / tiles, end = rows * (tile + 1) / tiles;
      if (tile * lines_per_step >= STEP_LINES) prefetch.lines_per_step = 0;
      add_products_of(end - row, x + row * k + 2 * done, k, weight, pairs, prefetch,
                      chunk.of_row(row));
      prefetch.next += pairs / STEP_PAIRS * prefetch.lines_per_step * 64;
    }
  }
}

}  // namespace detail

// sums [rows][PANEL] = x [rows, k] @ panel^T. `next` is the panel that this thread reads after it.
inline void multiply_panel(const bf16* x, int64_t rows, const PackedLinear& weight, int64_t panel,
                           int64_t next, float* sums) {
  alignas(64) float others[(STACK_SIZE - 1) * MAX_BLOCK_ROWS * PANEL];
  float* stack[STACK_SIZE] = {sums};
  for (int i = 1; i < STACK_SIZE; ++i) stack[i] = others + (i - 1) * rows * PANEL;
  for (int64_t i = 0; i < weight.num_sums; ++i) {
    const Range inputs{weight.k * i / weight.num_sums, weight.k * (i + 1) / weight.num_sums};
    // A binary counter: bits of i are subtrees on the stack, and those that i + 1 carries are whole.
    const PartialSums part{stack + __builtin_popcountll(i), 0, false, __builtin_ctzll(i + 1)};
    if (weight.bits == 16)
      detail::multiply_bf16_panel(x, rows, reinterpret_cast<const bf16*>(weight.panel(panel)),
                                  weight.k, inputs,
                                  reinterpret_cast<const bf16*>(weight.panel(next)), part);
    else
      multiply_int_panel(x, rows, weight, panel, inputs, part);
  }
}

namespace detail {

// How the rows are cut into blocks: as few as fit, but enough to give every thread a panel.
struct RowBlocks {
  int64_t rows, count;

  RowBlocks(int64_t m, int64_t num_panels, int64_t num_threads) : rows(m) {
    int64_t per_thread = std::min((num_threads + num_panels - 1) / num_panels,
                                  (m + TILE_ROWS - 1) / TILE_ROWS);
    count = std::max((m + MAX_BLOCK_ROWS - 1) / MAX_BLOCK_ROWS, per_thread);
  }
  Range block(int64_t index) const { return {rows * index / count, rows * (index + 1) / count}; }
};

// Calls body(rows, panel, next panel) for this thread's share of all row blocks and `num_panels`.
template <typename Body>
void for_each_panel(const Team& team, int64_t m, int64_t num_panels, const Body& body) {
  const RowBlocks blocks(m, num_panels, team.size);
  const Range share = team.share(blocks.count * num_panels);
  for (int64_t unit = share.begin; unit < share.end; ++unit) {
    const int64_t after = unit + 1 < share.end ? unit + 1 : unit;
    body(blocks.block(unit / num_panels), unit % num_panels, after % num_panels);
  }
}

// The biases of a panel's outputs, 0 where there are none.
struct Biases {
  float values[PANEL] = {};

  Biases(const PackedLinear& weight, int64_t panel) {
    if (weight.bias == nullptr) return;
    const bf16* bias = weight.bias + weight.first_output(panel);
    for (int64_t i = 0; i < weight.num_outputs(panel); ++i) values[i] = to_float(bias[i]);
  }
  PDS_INLINE F32 add_to(const float* sums, int v) const {
    return add(load(sums + v * LANES), load(values + v * LANES));
  }
};

// Writes the first `width` of a panel's outputs for one row; output(v) is the v-th vector of them.
template <typename Output>
PDS_INLINE void store_row(bf16* out, int64_t width, const Output& output) {
  bf16 padded[PANEL];
  bf16* target = width == PANEL ? out : padded;
  for (int v = 0; v < PANEL_VECTORS; ++v) store_bf16(target + v * LANES, output(v));
  if (width < PANEL) std::memcpy(out, padded, width * sizeof(bf16));
}

}  // namespace detail

// out [m, n] = x [m, k] @ weight^T + bias, rounded once to bf16, with what adapters add to some rows.
inline void linear(const Team& team, const bf16* x, int64_t m, const PackedLinear& weight, bf16* out,
                   const LoraRows& lora = {}) {
  using namespace detail;
  alignas(64) float sums[MAX_BLOCK_ROWS * PANEL];
  for_each_panel(team, m, weight.num_panels(), [&](Range rows, int64_t panel, int64_t next) {
    multiply_panel(x + rows.begin * weight.k, rows.end - rows.begin, weight, panel, next, sums);
    lora.add_to(rows, panel, sums);
    const Biases biases(weight, panel);
    const int64_t width = weight.num_outputs(panel);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const float* row_sums = sums + (row - rows.begin) * PANEL;
      store_row(out + row * weight.n + weight.first_output(panel), width,
                [&](int v) { return biases.add_to(row_sums, v); });
    }
  });
}

// out [m, n] = x [m, k] @ weight^T, neither rounded nor with a bias.
inline void linear_sums(const Team& team, const bf16* x, int64_t m, const PackedLinear& weight,
                        float* out) {
  using namespace detail;
  alignas(64) float sums[MAX_BLOCK_ROWS * PANEL];
  for_each_panel(team, m, weight.num_panels(), [&](Range rows, int64_t panel, int64_t next) {
    multiply_panel(x + rows.begin * weight.k, rows.end - rows.begin, weight, panel, next, sums);
    for (int64_t row = rows.begin; row < rows.end; ++row)
      std::copy_n(sums + (row - rows.begin) * PANEL, weight.num_outputs(panel),
                  out + row * weight.n + weight.first_output(panel));
  });
}

// sums [m, n] += what adapters add to some rows, which are shrunk.
inline void expand(const Team& team, int64_t m, const PackedLinear& weight, const LoraRows& lora,
                   float* sums) {
  alignas(64) float of_panel[PANEL] = {};
  const Range share = team.share(weight.num_panels());
  for (int64_t panel = share.begin; panel < share.end; ++panel)
    for (int64_t row = 0; row < m; ++row) {
      float* place = sums + row * weight.n + weight.first_output(panel);
      std::copy_n(place, weight.num_outputs(panel), of_panel);
      lora.add_to(Range{row, row + 1}, panel, of_panel);
      std::copy_n(of_panel, weight.num_outputs(panel), place);
    }
}

// out [m, n / 2] = silu(gate) * up, where [gate | up] = x @ weight^T + bias; the weight has to have
// two parts. gate, up and silu(gate) are rounded to bf16 first, as by `linear` and `silu_and_mul`.
inline void linear_silu_mul(const Team& team, const bf16* x, int64_t m, const PackedLinear& weight,
                            bf16* out, const LoraRows& lora = {}) {
  using namespace detail;
  alignas(64) float gates[MAX_BLOCK_ROWS * PANEL];
  alignas(64) float ups[MAX_BLOCK_ROWS * PANEL];
  const int64_t part = weight.part_panels();
  for_each_panel(team, m, part, [&](Range rows, int64_t panel, int64_t next) {
    const bf16* first = x + rows.begin * weight.k;
    const int64_t count = rows.end - rows.begin;
    multiply_panel(first, count, weight, panel, part + panel, gates);
    multiply_panel(first, count, weight, part + panel, next, ups);
    lora.add_to(rows, panel, gates);
    lora.add_to(rows, part + panel, ups);
    const Biases gate_biases(weight, panel), up_biases(weight, part + panel);
    const int64_t width = weight.num_outputs(panel);
    for (int64_t row = 0; row < count; ++row) {
      bf16* target = out + (rows.begin + row) * weight.part_outputs() + panel * PANEL;
      store_row(target, width, [&](int v) {
        F32 gate = rounded_to_bf16(gate_biases.add_to(gates + row * PANEL, v));
        F32 up = rounded_to_bf16(up_biases.add_to(ups + row * PANEL, v));
        return mul(rounded_to_bf16(silu(gate)), up);
      });
    }
  });
}

}  // namespace pds
