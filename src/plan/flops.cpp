#include "plan/flops.h"

namespace tapetune {

namespace {

double elements(const std::vector<at::Tensor>& tensors) {
  double sum = 0;
  for (const at::Tensor& t : tensors) sum += t.dim() == 2 ? static_cast<double>(t.numel()) : 0;
  return sum;
}

}  // namespace

std::int64_t first_trained_layer(const Llama& model) {
  std::int64_t layer = 0;
  if (model.weights().embedding.requires_grad()) return layer;
  while (layer < model.config().layers && model.trained_in(layer).empty()) ++layer;
  return layer;
}

StepFlops step_flops(const AdaptedModel& adapted, std::int64_t tokens, Checkpointing recomputed) {
  const Llama& model = adapted.model;
  const ModelConfig& config = model.config();
  const Training training;
  const double n = static_cast<double>(tokens), width = static_cast<double>(config.head_dim);
  const kernels::Visible visible = model.components().attention->visible({config, tokens, &training});
  const auto product = [&](const at::Tensor& weight, double forwards) {
    return 2 * n * static_cast<double>(weight.numel()) * (forwards + (weight.requires_grad() ? 2 : 1));
  };
  const std::int64_t first = first_trained_layer(model);
  const auto layer = [&](std::int64_t index) {
    const auto all = linears(model.weights().layers[static_cast<std::size_t>(index)]);
    const bool updates = model.components().positions->update_kind(index).attends;
    const double pairs = visible.within(config.layer(index).window).pairs(tokens, config.heads);
    const double forwards = recomputed == Checkpointing::off ? 1 : 2;
    double flops = 0;
    if (index < first) {  // forward only
      for (const Linear* linear : all) flops += 2 * n * static_cast<double>(linear->weight.numel());
      return flops + 4 * width * pairs;
    }
    for (const Linear* linear : all) flops += product(linear->weight, forwards);
    const double added = elements(model.added_in(index));
    flops += 2 * n * added * (forwards + 2);
    // Scores and values forward; backward those of q, k, v, the weights and the scores again. Extra values: one forward
    // and two backward more.
    const double attention_forwards = recomputed == Checkpointing::full ? 2 : 1;
    return flops + 2 * width * pairs * (attention_forwards * (updates ? 3 : 2) + (updates ? 7 : 5));
  };
  const double head = product(model.weights().head.weight, 1) + 6 * n * elements(model.added_in(config.layers));
  StepFlops flops{{}, head};
  for (std::int64_t i = 0; i < config.layers; ++i) flops.layers.push_back(layer(i));
  return flops;
}

}  // namespace tapetune
