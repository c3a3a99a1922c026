#include <chrono>

#include "core/log.h"
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
Timed timed_step(const AdaptedModel& adapted, const Recipe& recipe, std::int64_t tokens) {
  AdamW optimizer(adapted.parameters, {});
  ForwardInput in;
  in.tokens = at::randint(adapted.model.config().vocab_size, {recipe.micro_batch, tokens}, at::kLong);
  in.training = Training{recipe.checkpointing, 0};
  Timed best{INFINITY, INFINITY};
  for (int i = 0; i < 3; ++i) {
    for (const Parameter& p : adapted.parameters) p.value.mutable_grad().reset();
    const double start = now();
    const at::Tensor hidden = adapted.model.forward(in).last.flatten(0, 1);
    loss_sum(adapted.model, hidden, in.tokens.flatten(), in.training).backward();
    const double middle = now();
    optimizer.clip(1.0);
    optimizer.step(0.0);
    if (i > 0) best = {std::min(best.gradients, middle - start), std::min(best.optimizer, now() - middle)};
  }
  return best;
}

}  // namespace

double probe_step(const Recipe& recipe) {
  constexpr double budget = 5e11;  // operations that a desktop does in a few seconds
  constexpr std::int64_t fewest_layers = 3, fewest_tokens = 64;
  const PlannedBase base = planned_base(recipe);
  const AdaptedModel whole = adapt(base.config, base.weights, recipe.method, base.dtype);
  const auto rows = static_cast<double>(recipe.micro_batch);
  const auto operations = [&](std::int64_t layers, std::int64_t tokens) {
    return rows * step_flops(whole, tokens, recipe.checkpointing).total(layers);
  };
  // Fewer layers are much the same work, fewer tokens are less like it.
  std::int64_t layers = base.config.layers, tokens = recipe.context;
  while (layers > fewest_layers && operations(layers, tokens) > budget) --layers;
  while (tokens > fewest_tokens && operations(layers, tokens) > budget) tokens /= 2;

  ModelConfig config = base.config;
  config.layers = layers;
  const AdaptedModel part = adapt(config, random_weights(config, 0), recipe.method, base.dtype);
  const Timed timed = timed_step(part, recipe, tokens);
  const auto trained = [](const AdaptedModel& model) {
    double sum = 0;
    for (const Parameter& p : model.parameters) sum += static_cast<double>(p.value.numel());
    return sum;
  };
  const double grown = operations(base.config.layers, recipe.context) / operations(layers, tokens);
  return timed.gradients * grown * static_cast<double>(recipe.batch) / rows +
         timed.optimizer * trained(whole) / trained(part);
}

}  // namespace tapetune
