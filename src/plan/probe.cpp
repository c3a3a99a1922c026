#include <chrono>

#include "adapters/component.h"
#include "core/log.h"
#include "distributed/mesh.h"
#include "model/loss.h"
#include "plan/base.h"
#include "plan/plan.h"
#include "train/adamw.h"

namespace tapetune {

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Timed {
  double gradients = 0;  // seconds of a micro-batch
  double optimizer = 0;  // seconds of a step's update
};

// The best of a few, behind one that warms up.
Timed timed_step(const AdaptedModel& adapted, const Recipe& recipe, std::int64_t rows, std::int64_t tokens) {
  AdamW optimizer(adapted.parameters, {});
  ForwardInput in;
  in.tokens = at::randint(adapted.model.config().vocab_size, {rows, tokens}, at::kLong);
  in.training = Training{recipe.checkpointing, 0};
  Timed best{INFINITY, INFINITY};
  for (int i = 0; i < 3; ++i) {
    for (const Parameter& p : adapted.parameters) p.value.mutable_grad().reset();
    const double start = now();
    loss_sum(adapted.model, adapted.model.forward(in).last, in.tokens, in.training).backward();
    const double middle = now();
    optimizer.clip(1.0);
    optimizer.step(0.0);
    if (i > 0) best = {std::min(best.gradients, middle - start), std::min(best.optimizer, now() - middle)};
  }
  return best;
}

}  // namespace

double probe_step(const Recipe& recipe, double budget) {
  constexpr std::int64_t fewest_layers = 3, fewest_tokens = 64;
  const MetaModel base = meta_model(recipe);
  const AdaptedModel whole = adapt(base.config, base.weights, recipe.method, base.dtype);
  // Layers of the measured part all have the adapter: numbers of layers mean nothing in a shorter model.
  MethodOptions method = recipe.method;
  if (const auto& adapter = adapter_components().find(method.adapter.type); adapter.for_all_layers != nullptr) {
    adapter.for_all_layers(method.adapter);
  }
  const AdaptedModel even = adapt(base.config, base.weights, method, base.dtype);
  const std::int64_t micro_batch = share_batch(recipe, 1).micro_batch;
  const auto rows = static_cast<double>(micro_batch);
  const auto operations = [&](const AdaptedModel& model, std::int64_t layers, std::int64_t tokens) {
    return rows * step_flops(model, tokens, recipe.checkpointing).total(layers);
  };
  // Fewer layers are much the same work, fewer tokens are less like it.
  std::int64_t layers = base.config.layers, tokens = recipe.context;
  while (layers > fewest_layers && operations(even, layers, tokens) > budget) --layers;
  while (tokens > fewest_tokens && operations(even, layers, tokens) > budget) tokens /= 2;

  ModelConfig config = base.config;
  config.layers = layers;
  const AdaptedModel part = adapt(config, random_weights(config, 0), method, base.dtype);
  const Timed timed = timed_step(part, recipe, micro_batch, tokens);
  const auto trained = [](const AdaptedModel& model) {
    double sum = 0;
    for (const Parameter& p : model.parameters) sum += static_cast<double>(p.value.numel());
    return sum;
  };
  const double grown = operations(whole, base.config.layers, recipe.context) / operations(even, layers, tokens);
  return timed.gradients * grown * static_cast<double>(recipe.batch) / rows +
         timed.optimizer * trained(whole) / trained(part);
}

}  // namespace tapetune
