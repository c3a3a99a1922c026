#include "plan/flops.h"

namespace tapetune {

namespace {

// Pairs of a query and a key that it sees, summed over heads.
double seen_pairs(const ModelConfig& config, const kernels::Cuts& cuts, std::int64_t tokens) {
  const auto area = [&](const std::vector<std::int64_t>& starts) {
    double sum = 0;
    for (std::size_t i = 0; i < starts.size(); ++i) {
      const auto length = static_cast<double>((i + 1 < starts.size() ? starts[i + 1] : tokens) - starts[i]);
      sum += length * length / 2;
    }
    return sum;
  };
  const auto all = static_cast<double>(tokens) * static_cast<double>(tokens) / 2;
  const double half = static_cast<double>(config.heads) / 2;
  return cuts.first.empty() ? 2 * half * all : half * (area(cuts.first) + area(cuts.second));
}

double elements(const std::vector<at::Tensor>& tensors) {
  double sum = 0;
  for (const at::Tensor& t : tensors) sum += t.dim() == 2 ? static_cast<double>(t.numel()) : 0;
  return sum;
}

}  // namespace

StepFlops step_flops(const AdaptedModel& adapted, std::int64_t tokens, Checkpointing recomputed) {
  const Llama& model = adapted.model;
  const ModelConfig& config = model.config();
  const Training training;
  const double n = static_cast<double>(tokens), width = static_cast<double>(config.head_dim);
  const double pairs = seen_pairs(config, model.seams().attention->cuts(config, tokens, &training), tokens);
  const auto product = [&](const at::Tensor& weight, double forwards) {
    return 2 * n * static_cast<double>(weight.numel()) * (forwards + (weight.requires_grad() ? 2 : 1));
  };
  const auto layer = [&](std::int64_t index) {
    const bool updates = model.seams().position->updates(index);
    const double forwards = recomputed == Checkpointing::off ? 1 : 2;
    double flops = 0;
    for (const Linear* linear : linears(model.weights().layers[static_cast<std::size_t>(index)])) {
      flops += product(linear->weight, forwards);
    }
    const double added =
        elements(model.seams().linear->trained(index)) + elements(model.seams().position->trained(index));
    flops += 2 * n * added * (forwards + 2);
    // Scores and values forward; backward those of q, k, v, the weights and the scores again. More values: one forward
    // and two backward more.
    const double attention_forwards = recomputed == Checkpointing::full ? 2 : 1;
    return flops + 2 * width * pairs * (attention_forwards * (updates ? 3 : 2) + (updates ? 7 : 5));
  };
  const double head =
      product(model.weights().head.weight, 1) + 6 * n * elements(model.seams().linear->trained(config.layers));
  return {layer(0), layer(config.layers - 1) + head};
}

}  // namespace tapetune
