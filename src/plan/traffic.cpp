#include "plan/traffic.h"

#include "distributed/mesh.h"

namespace tapetune {

namespace {

double frozen(const at::Tensor& t) {
  return t.defined() && !t.requires_grad() ? static_cast<double>(t.numel() * t.element_size()) : 0;
}

double frozen(const LayerWeights& layer) {
  double sum = 0;
  for (const Linear* linear : linears(layer)) sum += frozen(linear->weight) + frozen(linear->bias);
  return sum;
}

struct Units {
  double embedding, head, layers = 0, largest = 0;
  explicit Units(const LlamaWeights& w)
      : embedding(frozen(w.embedding)), head(frozen(w.head.weight) + frozen(w.head.bias)) {
    for (const LayerWeights& layer : w.layers) {
      layers += frozen(layer);
      largest = std::max(largest, frozen(layer));
    }
  }
};

// Bytes of a layer's all-to-alls for one token: forward, so many times, to all tokens of some heads and back; and once
// the same for the gradients, with a number of f32 for each head: the results themselves stay with their tokens.
double exchanged_a_token(const AdaptedModel& adapted, std::int64_t layer, std::int64_t sequence_size, double forwards) {
  const ModelConfig& c = adapted.model.config();
  const PositionEncoding& encoding = *adapted.model.components().positions;
  const std::int64_t shared = c.kv_heads % sequence_size == 0 ? c.kv_heads
                              : sequence_size % c.kv_heads == 0
                                  ? sequence_size
                                  : c.heads;  // key and value heads, repeated where they must be
  const bool attends = encoding.update_kind(layer).attends;
  // A state that no layer has changed yet has no gradient.
  const bool learned = attends && encoding.changes(layer);
  const std::int64_t there = c.heads + 2 * shared + (attends ? shared : 0), back = c.heads * (attends ? 2 : 1);
  const std::int64_t unlearned = attends && !learned ? shared : 0;
  const auto bytes = static_cast<double>(c.head_dim) * static_cast<double>(c10::elementSize(adapted.model.dtype()));
  return ((forwards + 1) * static_cast<double>(there + back) - static_cast<double>(unlearned)) * bytes +
         static_cast<double>(4 * c.heads);
}

}  // namespace

StepTraffic step_traffic(const AdaptedModel& adapted, const Recipe& recipe, std::int64_t ranks) {
  StepTraffic traffic;
  if (ranks == 1) return traffic;
  const std::int64_t sequence_size = recipe.sequence_parallel;
  const BatchShare share = share_batch(recipe, ranks);
  const auto others = [](std::int64_t n) { return static_cast<double>(n - 1) / static_cast<double>(n); };
  double trained = 0;
  for (const Parameter& p : adapted.parameters)
    trained += static_cast<double>(p.value.numel() * p.value.element_size());
  traffic.gradients = 2 * others(ranks) * (trained + 16);
  const auto passes = static_cast<double>(share.passes);
  if (recipe.shard == "base") {
    const Units units(adapted.model.weights());
    traffic.weights = passes * others(ranks) * (units.embedding + units.head + 2 * units.layers);
    traffic.values = others(ranks) * trained;
  }
  if (sequence_size > 1) {
    const std::int64_t whole_tokens =
        share.sequences * (recipe.context / sequence_size);  // sequence_parallel divides the context
    const auto tokens = static_cast<double>(whole_tokens);
    const double forwards = recipe.checkpointing == Checkpointing::off ? 1 : 2;
    for (std::int64_t i = 0; i < adapted.model.config().layers; ++i) {
      traffic.sequence += tokens * others(sequence_size) * exchanged_a_token(adapted, i, sequence_size, forwards);
    }
  }
  return traffic;
}

double gathered_bytes(const AdaptedModel& adapted) {
  const Units units(adapted.model.weights());
  return std::max(2 * units.largest, units.largest + std::max(units.embedding, units.head));
}

double frozen_bytes(const AdaptedModel& adapted) {
  const Units units(adapted.model.weights());
  const LlamaWeights& w = adapted.model.weights();
  return units.embedding + (w.head.weight.is_same(w.embedding) ? 0 : units.head) + units.layers;
}

}  // namespace tapetune
