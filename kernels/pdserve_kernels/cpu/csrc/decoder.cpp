#include "decoder.h"

#include <optional>

#include "attention.h"
#include "carver.h"

namespace pds {
namespace {

// With so few rows every thread norms all of them for itself: a barrier would take longer.
constexpr int64_t MAX_ROWS_NORMED_BY_ALL = 4;

struct Workspace {
  // [num_tokens, hidden_size], one after another for each thread that norms by itself.
  bf16* residuals;
  bf16* normed;
  bf16* qkv;        // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
  bf16* attended;   // [num_tokens, num_heads * head_dim]
  bf16* activated;  // [num_tokens, intermediate_size]
  bf16* projected;  // [num_tokens, hidden_size]
  float* attention;
  float* shrunk;  // [num_tokens, row_ranks]
  std::optional<MoeWorkspace> moe;  // layers with experts are of one shape

  Workspace(Carver& carver, const Decoder& decoder, const Step& step, int64_t num_threads) {
    const int64_t m = step.num_tokens, num_kv_heads = step.kv.num_kv_heads;
    const int64_t head_dim = step.kv.head_dim, hidden = m * decoder.hidden_size;
    const int64_t copies = m <= MAX_ROWS_NORMED_BY_ALL ? num_threads : 1;
    residuals = carver.take<bf16>(copies * hidden);
    normed = carver.take<bf16>(copies * hidden);
    qkv = carver.take<bf16>(m * (decoder.num_heads + 2 * num_kv_heads) * head_dim);
    attended = carver.take<bf16>(m * decoder.num_heads * head_dim);
    activated = carver.take<bf16>(m * decoder.intermediate_size);
    projected = carver.take<bf16>(hidden);
    int64_t floats = 0;
    for (int64_t group = 0; group < step.num_groups; ++group)
      floats = std::max(floats, attention_scratch_size(num_threads, decoder.num_heads, step.kv,
                                                       step.batches[group]));
    attention = carver.take<float>(floats);
    shrunk = carver.take<float>(m * step.row_ranks);
    for (int64_t layer = 0; layer < decoder.num_layers && !moe; ++layer)
      if (decoder.layers[layer].moe != nullptr)
        moe.emplace(carver, *decoder.layers[layer].moe, m);
  }
};

// The tokens' states on their way through the layers, as one thread has them.
struct States {
  // Alone, if this thread norms all rows for itself.
  Team normers;
  int64_t num_tokens, hidden_size;
  float eps;
  bf16* residual;
  bf16* normed;

  States(const Team& team, const Decoder& decoder, const Step& step, const Workspace& workspace)
      : normers(team), num_tokens(step.num_tokens), hidden_size(decoder.hidden_size),
        eps(decoder.eps), residual(workspace.residuals), normed(workspace.normed) {
    if (num_tokens > MAX_ROWS_NORMED_BY_ALL) return;
    normers = Team{0, 1};
    residual += team.rank * num_tokens * hidden_size;
    normed += team.rank * num_tokens * hidden_size;
  }

  void start(const Team& team, const bf16* hidden_states, const bf16* norm) const {
    Range rows = normers.share(num_tokens);
    std::copy(hidden_states + rows.begin * hidden_size, hidden_states + rows.end * hidden_size,
              residual + rows.begin * hidden_size);
    Rows all{num_tokens, 1, hidden_size, 0, hidden_size};
    rms_norm(normers, residual, all, norm, eps, normed);
    if (normers.size > 1) team.barrier();
  }

  // After a barrier, and with one behind it where another thread's rows are read.
  void add(const Team& team, const bf16* x, const bf16* norm) const {
    add_rms_norm(normers, x, residual, num_tokens, hidden_size, norm, eps, normed);
    if (normers.size > 1) team.barrier();
  }
};

void attend(const Team& team, const Decoder& decoder, const DecoderLayer& layer, const Step& step,
            const Workspace& workspace) {
  const Batch& batch = step.batches[layer.group];
  const QkvHeads heads{decoder.num_heads, layer.q_norm, layer.k_norm, decoder.eps};
  qk_norm_rope_cache(team, workspace.qkv, step.num_tokens, heads, decoder.rotary, step.positions,
                     step.kv, layer.slot, batch.slot_mapping);
  team.barrier();
  int64_t width = (decoder.num_heads + 2 * step.kv.num_kv_heads) * step.kv.head_dim;
  paged_attention(team, workspace.qkv, width, decoder.num_heads, step.kv, layer.slot, batch,
                  decoder.scale, layer.window, 0.0f, workspace.attended, workspace.attention);
  team.barrier();
}

// Shrunk rows = what all ranks have shrunk of them, times the scales; it begins at `first` of a slot.
void add_up_shrunk(const Group& group, Range rows, int64_t first, const LoraRows& lora) {
  const RankSums sums(group);
  for (int64_t i = 0; i < lora.num_segments; ++i) {
    const LoraWeight& adapter = lora.weight(i);
    const Range adapted = lora.rows_of(i, rows);
    for (int64_t row = adapted.begin; row < adapted.end; ++row)
      for (int64_t rank = 0; rank < adapter.num_ranks; rank += LANES) {
        const int64_t left = std::min<int64_t>(LANES, adapter.num_ranks - rank);
        const int64_t place = first + (row - rows.begin) * lora.row_ranks + rank;
        float total[LANES];
        store(total, mul(load(adapter.scales + rank, left), sums.at(place, left)));
        std::copy_n(total, left, lora.shrunk + row * lora.row_ranks + rank);
      }
  }
}

// out [rows, n] = the sums of all ranks + bias, rounded once.
void add_up(const Team& team, const Group& group, Range rows, const PackedLinear& weight,
            bf16* out) {
  const RankSums sums(group);
  const Range columns = team.share(weight.n, LANES);
  for (int64_t row = 0; row < rows.end - rows.begin; ++row)
    for (int64_t i = columns.begin; i < columns.end; i += LANES) {
      const int64_t left = columns.end - i;
      const F32 bias = weight.bias == nullptr ? zero() : load_bf16(weight.bias + i, left);
      store_bf16(out + (rows.begin + row) * weight.n + i,
                 add(sums.at(row * weight.n + i, left), bias), left);
    }
}

// The same with adapters, by panels.
void add_up_adapted(const Team& team, const Group& group, Range rows, const PackedLinear& weight,
                    bf16* out, const LoraRows& lora) {
  const RankSums sums(group);
  const Range share = team.share(weight.num_panels());
  alignas(64) float of_panel[PANEL] = {};
  for (int64_t panel = share.begin; panel < share.end; ++panel) {
    const detail::Biases biases(weight, panel);
    const int64_t first = weight.first_output(panel), width = weight.num_outputs(panel);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const int64_t place = (row - rows.begin) * weight.n + first;
      for (int64_t i = 0; i < width; i += LANES)
        store(of_panel + i, sums.at(place + i, width - i));
      lora.add_to(Range{row, row + 1}, panel, of_panel);
      detail::store_row(out + row * weight.n + first, width,
                        [&](int v) { return biases.add_to(of_panel, v); });
    }
  }
}

// `linear`, of which every rank has a part of the inputs; as many rows at once as fit a slot, behind
// which what adapters shrink of them lies. Returns false, to all threads, if a rank does not come.
bool linear_of_ranks(const Team& team, Group& group, const bf16* x, int64_t m,
                     const PackedLinear& weight, bf16* out, const LoraRows& lora) {
  const bool is_adapted = !lora.is_empty();
  const int64_t width = weight.n + (is_adapted ? lora.row_ranks : 0);
  const int64_t at_once = group.slot_bytes / static_cast<int64_t>(width * sizeof(float));
  for (int64_t first = 0; first < m; first += at_once) {
    const Range rows{first, std::min(m, first + at_once)};
    const int64_t num_sums = (rows.end - first) * weight.n;
    float* slot = group.own_slot<float>();
    linear_sums(team, x + first * weight.k, rows.end - first, weight, slot);
    if (is_adapted) shrink_share(team, x, weight, rows, lora, true, slot + num_sums);
    team.barrier();
    if (team.rank == 0 && exchange(group) && is_adapted) add_up_shrunk(group, rows, num_sums, lora);
    team.barrier();
    if (group.has_failed()) return false;
    // No barrier before the next rows: they go to the other slot.
    if (is_adapted)
      add_up_adapted(team, group, rows, weight, out, lora);
    else
      add_up(team, group, rows, weight, out);
  }
  return true;
}

// out = x @ weight^T + bias for a weight whose inputs the ranks share, and a barrier behind it.
bool project(const Team& team, const Decoder& decoder, const bf16* x, int64_t m,
             const PackedLinear& weight, bf16* out, const LoraRows& lora) {
  if (decoder.group == nullptr) {
    shrink(team, x, m, weight, lora);
    linear(team, x, m, weight, out, lora);
  } else if (!linear_of_ranks(team, *decoder.group, x, m, weight, out, lora)) {
    return false;
  }
  team.barrier();
  return true;
}

}  // namespace

int64_t decoder_workspace_size(const Decoder& decoder, const Step& step, int64_t num_threads) {
  Carver carver{0};
  Workspace(carver, decoder, step, num_threads);
  return static_cast<int64_t>(carver.next);
}

void run_decoder(const Team& team, const Decoder& decoder, const Step& step,
                 const bf16* hidden_states, bf16* out, void* workspace_memory) {
  Carver carver{reinterpret_cast<uintptr_t>(workspace_memory)};
  const Workspace workspace(carver, decoder, step, team.size);
  const States states(team, decoder, step, workspace);
  const int64_t m = step.num_tokens;
  states.start(team, hidden_states, decoder.layers[0].input_norm);
  for (int64_t index = 0; index < decoder.num_layers; ++index) {
    const DecoderLayer& layer = decoder.layers[index];
    const bool is_last = index + 1 == decoder.num_layers;
    const auto adapters = [&](const LoraWeight LoraLayer::* part) {
      return LoraRows{step.segments, step.num_segments, index, part, workspace.shrunk,
                      step.row_ranks};
    };
    const LoraRows qkv = adapters(&LoraLayer::qkv), gate_up = adapters(&LoraLayer::gate_up);
    shrink(team, states.normed, m, layer.qkv, qkv);
    linear(team, states.normed, m, layer.qkv, workspace.qkv, qkv);
    team.barrier();
    attend(team, decoder, layer, step, workspace);
    if (!project(team, decoder, workspace.attended, m, layer.attention_output, workspace.projected,
                 adapters(&LoraLayer::attention_output)))
      return;
    states.add(team, workspace.projected, layer.post_attention_norm);
    if (layer.moe != nullptr) {
      fused_moe(team, *layer.moe, states.normed, m, *workspace.moe, workspace.projected);
      team.barrier();
    } else {
      shrink(team, states.normed, m, layer.gate_up, gate_up);
      linear_silu_mul(team, states.normed, m, layer.gate_up, workspace.activated, gate_up);
      team.barrier();
      if (!project(team, decoder, workspace.activated, m, layer.down, workspace.projected,
                   adapters(&LoraLayer::down)))
        return;
    }
    states.add(team, workspace.projected,
               is_last ? decoder.final_norm : decoder.layers[index + 1].input_norm);
  }
  Range rows = team.share(m);
  std::copy(states.normed + rows.begin * decoder.hidden_size,
            states.normed + rows.end * decoder.hidden_size, out + rows.begin * decoder.hidden_size);
}

}  // namespace pds

extern "C" {

void pds_decoder_workspace_size(const pds::Decoder* decoder, const pds::Step* step, int64_t* size) {
  *size = pds::decoder_workspace_size(*decoder, *step, omp_get_max_threads());
}

void pds_run_decoder(const pds::Decoder* decoder, const pds::Step* step,
                     const pds::bf16* hidden_states, pds::bf16* out, void* workspace) {
  pds::run_team([&](const pds::Team& team) {
    pds::run_decoder(team, *decoder, *step, hidden_states, out, workspace);
  });
}

}  // extern "C"
