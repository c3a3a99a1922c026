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
  constexpr double budget = 3e11;  // operations that a desktop does in a few seconds
  const PlannedBase base = planned_base(recipe);
  const std::int64_t layers = base.config.layers;
  ModelConfig config = base.config;
  config.layers = std::min<std::int64_t>(3, layers);
  LlamaWeights weights = random_weights(config, 0);
  const AdaptedModel three = adapt(config, weights, recipe.method, base.dtype);
  config.layers = std::min<std::int64_t>(2, layers);
  weights.layers.resize(static_cast<std::size_t>(config.layers));
  const AdaptedModel two = adapt(config, weights, recipe.method, base.dtype);
  std::int64_t tokens = recipe.context;
  const auto rows = static_cast<double>(recipe.micro_batch);
  while (tokens > 64 && rows * step_flops(three, tokens, recipe.checkpointing).total(3) > budget) tokens /= 2;
  const Timed small = timed_step(two, recipe, tokens);
  if (layers <= 2) {
    const double grown = step_flops(two, recipe.context, recipe.checkpointing).total(layers) /
                         step_flops(two, tokens, recipe.checkpointing).total(layers);
    return small.gradients * grown * static_cast<double>(recipe.batch) / rows + small.optimizer;
  }
  const Timed large = timed_step(three, recipe, tokens);
  const StepFlops here = step_flops(three, tokens, recipe.checkpointing),
                  there = step_flops(three, recipe.context, recipe.checkpointing);
  const double middle = std::max(0.0, large.gradients - small.gradients),
               rest = std::max(0.0, small.gradients - middle);
  const auto inner = static_cast<double>(layers - 1);
  const double micro = middle * inner * there.layer / here.layer + rest * there.rest / here.rest;
  const double update = small.optimizer + std::max(0.0, large.optimizer - small.optimizer) * (inner - 1);
  return micro * static_cast<double>(recipe.batch) / rows + update;
}

}  // namespace tapetune
