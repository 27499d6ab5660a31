#include "moe.h"

#include <cfloat>
#include <cmath>
#include <vector>

#include "linear.h"

namespace pds {
namespace {

// What reading a panel costs, in rows that are multiplied with it: by this experts of few and of many
// rows are shared fairly.
constexpr int64_t PANEL_COST = 16;

// Below all logits that count: a row of NaN has experts, too.
float order_of(float logit) { return logit > -FLT_MAX ? logit : -FLT_MAX; }

// Chooses a row's experts, those of the lowest ids among equal ones, and writes them in ascending order.
void choose(const float* logits, int64_t num_experts, int64_t top_k, int32_t* ids) {
  for (int64_t count = 0; count < top_k; ++count) {
    int32_t best = -1;
    for (int32_t expert = 0; expert < num_experts; ++expert) {
      if (best >= 0 && order_of(logits[expert]) <= order_of(logits[best])) continue;
      if (!std::binary_search(ids, ids + count, expert)) best = expert;
    }
    int32_t* place = std::lower_bound(ids, ids + count, best);
    std::copy_backward(place, ids + count, ids + count + 1);
    *place = best;
  }
}

float sigmoid(float x) {
  float of_all[LANES];
  store(of_all, div(set1(1.0f), add(set1(1.0f), exp(set1(-x)))));
  return of_all[0];
}

// Routes this thread's rows.
void route(const Team& team, const Moe& moe, int64_t m, const MoeWorkspace& workspace) {
  const int64_t num_experts = moe.num_experts();
  // The whole row is in it; a thread keeps it from row to row.
  thread_local std::vector<float> shares;
  const int64_t padded = (num_experts + LANES - 1) / LANES * LANES;
  shares.resize(padded);
  const Range rows = team.share(m);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const bf16* logits = workspace.logits + row * moe.router.n;
    if (moe.shared != nullptr)
      workspace.shared_weights[row] = sigmoid(to_float(logits[num_experts]));
    for (int64_t i = 0; i < num_experts; ++i) shares[i] = to_float(logits[i]);
    int32_t* ids = workspace.ids + row * moe.top_k;
    choose(shares.data(), num_experts, moe.top_k, ids);
    float highest = -FLT_MAX;
    for (int64_t i = 0; i < num_experts; ++i) highest = std::max(highest, order_of(shares[i]));
    std::fill(shares.begin() + num_experts, shares.end(), -INFINITY);
    F32 sums = zero();
    for (int64_t i = 0; i < padded; i += LANES) {
      const F32 share = exp(sub(load(&shares[i]), set1(highest)));
      store(&shares[i], share);
      sums = add(sums, share);
    }
    float total = sum_lanes(sums);
    if (moe.renormalize) {
      total = 0.0f;
      for (int64_t i = 0; i < moe.top_k; ++i) total += shares[ids[i]];
    }
    for (int64_t i = 0; i < moe.top_k; ++i)
      workspace.weights[row * moe.top_k + i] = shares[ids[i]] / total;
  }
}

// Sorts pairs by experts, and those of an expert by rows.
void sort_pairs(const Moe& moe, int64_t m, const MoeWorkspace& workspace) {
  const int64_t num_pairs = m * moe.top_k, num_experts = moe.num_experts();
  int32_t* first = workspace.first_pairs;
  std::fill(first, first + num_experts + 1, 0);
  for (int64_t pair = 0; pair < num_pairs; ++pair) ++first[workspace.ids[pair] + 1];
  for (int64_t expert = 0; expert < num_experts; ++expert) first[expert + 1] += first[expert];
  for (int64_t pair = 0; pair < num_pairs; ++pair)
    workspace.sorted[first[workspace.ids[pair]]++] = static_cast<int32_t>(pair);
  // Each now is where the next one begins.
  std::copy_backward(first, first + num_experts, first + num_experts + 1);
  first[0] = 0;
}

void gather(const Team& team, const Moe& moe, const bf16* x, int64_t m,
            const MoeWorkspace& workspace) {
  const int64_t size = moe.hidden_size();
  const Range places = team.share(m * moe.top_k);
  for (int64_t place = places.begin; place < places.end; ++place)
    std::copy_n(x + workspace.sorted[place] / moe.top_k * size, size,
                workspace.gathered + place * size);
}

// activated = silu(gate) * up of some sorted pairs of an expert, for a panel of each.
void activate_panel(const PackedLinear& weight, int64_t panel, int64_t next, Range places,
                    const MoeWorkspace& workspace, float* gates, float* ups) {
  const int64_t part = weight.part_panels(), width = weight.num_outputs(panel);
  const int64_t count = places.end - places.begin;
  const bf16* x = workspace.gathered + places.begin * weight.k;
  multiply_panel(x, count, weight, panel, part + panel, gates);
  multiply_panel(x, count, weight, part + panel, next, ups);
  for (int64_t row = 0; row < count; ++row) {
    bf16* target = workspace.activated + (places.begin + row) * weight.part_outputs() + panel * PANEL;
    detail::store_row(target, width, [&](int v) {
      const F32 gate = rounded_to_bf16(load(gates + row * PANEL + v * LANES));
      const F32 up = rounded_to_bf16(load(ups + row * PANEL + v * LANES));
      return mul(rounded_to_bf16(silu(gate)), up);
    });
  }
}

// Calls body(rows) for at most MAX_BLOCK_ROWS of them at a time.
template <typename Body>
void for_each_block(Range rows, const Body& body) {
  const int64_t count = rows.end - rows.begin;
  const int64_t num_blocks = (count + MAX_BLOCK_ROWS - 1) / MAX_BLOCK_ROWS;
  for (int64_t block = 0; block < num_blocks; ++block)
    body(Range{rows.begin + count * block / num_blocks,
               rows.begin + count * (block + 1) / num_blocks});
}

// Panels of all experts that have rows, shared among threads by what they cost.
void activate(const Team& team, const Moe& moe, const MoeWorkspace& workspace) {
  alignas(64) float gates[MAX_BLOCK_ROWS * PANEL];
  alignas(64) float ups[MAX_BLOCK_ROWS * PANEL];
  const int64_t num_panels = moe.gate_up[0].part_panels();
  const auto pairs_of = [&](int64_t expert) {
    return Range{workspace.first_pairs[expert], workspace.first_pairs[expert + 1]};
  };
  const auto cost_of = [&](int64_t expert) {
    const Range pairs = pairs_of(expert);
    return pairs.begin == pairs.end ? 0 : PANEL_COST + pairs.end - pairs.begin;
  };
  int64_t total = 0;
  for (int64_t expert = 0; expert < moe.num_experts(); ++expert)
    total += num_panels * cost_of(expert);
  const Range share = team.share(total);
  int64_t cost = 0;
  for (int64_t expert = 0; expert < moe.num_experts(); ++expert) {
    const int64_t panel_cost = cost_of(expert);
    if (panel_cost == 0) continue;
    for (int64_t panel = 0; panel < num_panels; ++panel, cost += panel_cost) {
      if (cost < share.begin || cost >= share.end) continue;
      const int64_t next = panel + 1 < num_panels ? panel + 1 : panel;
      for_each_block(pairs_of(expert), [&](Range places) {
        activate_panel(moe.gate_up[expert], panel, next, places, workspace, gates, ups);
      });
    }
  }
}

// total [PANEL] += factor * sums
void add_scaled(float factor, const float* sums, float* total) {
  for (int i = 0; i < PANEL; i += LANES)
    store(total + i, fma(set1(factor), load(sums + i), load(total + i)));
}

// Adds to totals [m][PANEL] what some sorted pairs of an expert bring for a panel of outputs.
void add_panel(const Moe& moe, const PackedLinear& weight, int64_t panel, int64_t next,
               Range places, const MoeWorkspace& workspace, float* sums, float* totals) {
  multiply_panel(workspace.activated + places.begin * weight.k, places.end - places.begin, weight,
                 panel, next, sums);
  for (int64_t place = places.begin; place < places.end; ++place) {
    const int32_t pair = workspace.sorted[place];
    add_scaled(workspace.weights[pair], sums + (place - places.begin) * PANEL,
               totals + pair / moe.top_k * PANEL);
  }
}

// Adds to totals [m][PANEL] what the shared expert brings some rows for a panel of outputs.
void add_shared_panel(const PackedLinear& weight, int64_t panel, int64_t next, Range rows,
                      const MoeWorkspace& workspace, float* sums, float* totals) {
  multiply_panel(workspace.shared_activated + rows.begin * weight.k, rows.end - rows.begin, weight,
                 panel, next, sums);
  for (int64_t row = rows.begin; row < rows.end; ++row)
    add_scaled(workspace.shared_weights[row], sums + (row - rows.begin) * PANEL,
               totals + row * PANEL);
}

// This thread's panels of out: those of an expert follow each other in memory, and experts come in the
// order of ids, the shared one behind them.
void add_up_experts(const Team& team, const Moe& moe, int64_t m, const MoeWorkspace& workspace,
                    bf16* out) {
  alignas(64) float sums[MAX_BLOCK_ROWS * PANEL];
  const Range panels = team.share(moe.down[0].num_panels());
  const auto totals_of = [&](int64_t panel) { return workspace.totals + panel * m * PANEL; };
  std::fill(totals_of(panels.begin), totals_of(panels.end), 0.0f);
  for (int64_t expert = 0; expert < moe.num_experts(); ++expert) {
    const PackedLinear& weight = moe.down[expert];
    const Range pairs{workspace.first_pairs[expert], workspace.first_pairs[expert + 1]};
    for (int64_t panel = panels.begin; panel < panels.end && pairs.begin < pairs.end; ++panel) {
      const int64_t next = panel + 1 < panels.end ? panel + 1 : panel;
      for_each_block(pairs, [&](Range places) {
        add_panel(moe, weight, panel, next, places, workspace, sums, totals_of(panel));
      });
    }
  }
  for (int64_t panel = panels.begin; panel < panels.end && moe.shared != nullptr; ++panel) {
    const int64_t next = panel + 1 < panels.end ? panel + 1 : panel;
    for_each_block(Range{0, m}, [&](Range rows) {
      add_shared_panel(moe.shared->down, panel, next, rows, workspace, sums, totals_of(panel));
    });
  }
  for (int64_t panel = panels.begin; panel < panels.end; ++panel)
    for (int64_t row = 0; row < m; ++row)
      detail::store_row(out + row * moe.down[0].n + panel * PANEL, moe.down[0].num_outputs(panel),
                        [&](int v) { return load(totals_of(panel) + row * PANEL + v * LANES); });
}

}  // namespace

MoeWorkspace::MoeWorkspace(Carver& carver, const Moe& moe, int64_t m) {
  const int64_t num_pairs = m * moe.top_k;
  logits = carver.take<bf16>(m * moe.router.n);
  ids = carver.take<int32_t>(num_pairs);
  weights = carver.take<float>(num_pairs);
  first_pairs = carver.take<int32_t>(moe.num_experts() + 1);
  sorted = carver.take<int32_t>(num_pairs);
  gathered = carver.take<bf16>(num_pairs * moe.hidden_size());
  activated = carver.take<bf16>(num_pairs * moe.intermediate_size());
  totals = carver.take<float>(moe.down[0].num_panels() * m * PANEL);
  shared_weights = carver.take<float>(moe.shared == nullptr ? 0 : m);
  shared_activated = carver.take<bf16>(moe.shared == nullptr ? 0 : m * moe.shared->down.k);
}

void fused_moe(const Team& team, const Moe& moe, const bf16* x, int64_t m,
               const MoeWorkspace& workspace, bf16* out) {
  linear(team, x, m, moe.router, workspace.logits);
  if (moe.shared != nullptr)
    linear_silu_mul(team, x, m, moe.shared->gate_up, workspace.shared_activated);
  team.barrier();
  route(team, moe, m, workspace);
  team.barrier();
  if (team.rank == 0) sort_pairs(moe, m, workspace);
  team.barrier();
  gather(team, moe, x, m, workspace);
  team.barrier();
  activate(team, moe, workspace);
  team.barrier();
  add_up_experts(team, moe, m, workspace, out);
}

}  // namespace pds

extern "C" {

void pds_moe_workspace_size(const pds::Moe* moe, int64_t m, int64_t* size) {
  pds::Carver carver{0};
  pds::MoeWorkspace(carver, *moe, m);
  *size = static_cast<int64_t>(carver.next);
}

void pds_fused_moe(const pds::bf16* x, int64_t m, const pds::Moe* moe, void* memory,
                   pds::bf16* out) {
  pds::run_team([&](const pds::Team& team) {
    pds::Carver carver{reinterpret_cast<uintptr_t>(memory)};
    pds::fused_moe(team, *moe, x, m, pds::MoeWorkspace(carver, *moe, m), out);
  });
}

}  // extern "C"
