#include "plan/activations.h"

#include "adapters/build_model.h"
#include "plan/flops.h"

namespace tapetune {

namespace {

// Numbers a token that one layer keeps for its backward, part by part, and that exist for a moment in it.
struct LayerNumbers {
  double input = 0;      // what the layer before it gave; all that full checkpointing keeps
  double attention = 0;  // the results of attention, which selective checkpointing keeps as well
  double rest = 0;
  double moment = 0;
  double kept() const { return input + attention + rest; }
};

// first: first_trained_layer.
LayerNumbers numbers(const AdaptedModel& adapted, std::int64_t index, std::int64_t first, bool state_learns) {
  const Llama& model = adapted.model;
  const ModelConfig& c = model.config();
  const auto number = [](std::int64_t n) { return static_cast<double>(n); };
  const double hidden = number(c.hidden_size), inner = number(c.intermediate_size), heads = number(c.heads),
               queries = number(c.heads * c.head_dim), keys = number(c.kv_heads * c.head_dim);
  const auto all = linears(model.weights().layers[static_cast<std::size_t>(index)]);
  const auto is_adapted = [&](const std::string& prefix) {
    return std::ranges::any_of(adapted.parameters, [&](const Parameter& p) {
      return p.owner == Owner::adapter && p.name.starts_with(prefix);
    });
  };
  const bool any_adapted = is_adapted(fmt::format("model.layers.{}.", index));
  const auto has_adapter = [&](Projection which) { return any_adapted && is_adapted(module_name(index, which) + "."); };
  const auto trains = [&](Projection which) {
    return all[static_cast<std::size_t>(which)]->weight.requires_grad() || has_adapter(which);
  };
  const bool updates = model.components().positions->update_kind(index).changes;

  LayerNumbers n;
  const double update = model.components().positions->saved_numbers(index);
  const LayerWeights& w = model.weights().layers[static_cast<std::size_t>(index)];
  if (index <= first && !any_adapted && !w.q.weight.requires_grad() && !w.input_norm.requires_grad() &&
      !model.weights().embedding.requires_grad()) {
    // Nothing before or in this layer learns but how positions change.
    n.rest = updates ? keys + queries + update : 0;
    return n;
  }
  n.input = hidden + (updates || state_learns ? keys : 0);
  n.attention = queries * (updates ? 2 : 1) + heads;
  n.rest = queries + 2 * keys + hidden + 2 * inner;  // q, k, v; the input of the second norm; gate and up
  if (state_learns) n.rest += queries + keys;        // before they are turned
  if (w.q_norm.defined()) n.rest += queries + keys;  // before their norms
  if (trains(Projection::q) || trains(Projection::k) || trains(Projection::v)) n.rest += hidden;
  if (trains(Projection::gate) || trains(Projection::up)) n.rest += hidden;
  if (trains(Projection::down)) n.rest += inner;
  n.rest += model.components().adapter->saved_numbers(index) + update;
  // The gradients of the feed-forward's inside, when what its last projection kept is gone; or those of attention, when
  // the inside is gone.
  n.moment = std::max((trains(Projection::down) ? 2 : 3) * inner + 2 * hidden, 5 * queries + hidden - 2 * inner);
  return n;
}

}  // namespace

StepMemory step_memory(const AdaptedModel& adapted, std::int64_t rows, std::int64_t tokens,
                       Checkpointing checkpointing) {
  const Llama& model = adapted.model;
  const ModelConfig& c = model.config();
  const double places = static_cast<double>(rows * tokens),
               bytes = places * static_cast<double>(c10::elementSize(model.dtype()));
  const std::int64_t first = first_trained_layer(model);
  double kept = 0, again = 0;
  for (std::int64_t i = 0; i < c.layers; ++i) {
    const LayerNumbers n = numbers(adapted, i, first, i > 0 && model.components().positions->changes(c.layers));
    if (checkpointing == Checkpointing::off) {
      kept += n.kept();
      again = std::max(again, n.moment);
    } else {
      const double saved = n.input + (checkpointing == Checkpointing::selective ? n.attention : 0);
      kept += saved;
      again = std::max(again, n.kept() - saved + n.moment);  // what is saved is used, not copied
    }
  }
  const double hidden = static_cast<double>(c.hidden_size);
  kept += 3 * hidden;  // behind the last layer: its norm, and gradients
  const double logits = 4 * static_cast<double>(std::int64_t{1} << 24);  // one block of them
  const double block = std::min(logits, 4 * places * static_cast<double>(c.vocab_size));
  // The backward begins when the logits are gone.
  const double backward = again * bytes;
  const at::Tensor& head = model.weights().head.weight;
  const double gradient = head.requires_grad() ? 4 * static_cast<double>(head.numel()) : 0;  // waits for its turn
  return {kept * bytes + backward, gradient + std::max(0.0, block - backward), backward};
}

}  // namespace tapetune
