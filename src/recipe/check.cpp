#include "recipe/check.h"

#include "adapters/component.h"
#include "core/digits.h"

namespace tapetune::schema {

namespace {

void check_schedule(const Recipe& recipe, Entries& entries) {
  const auto& [kind, warmup, min_lr] = recipe.schedule;
  if (!entries.fine({"schedule.kind"})) return;
  if (entries.fine({"schedule.warmup", "steps"}) && kind != "constant" && warmup >= recipe.steps) {
    entries.report(entries.at({"schedule.warmup", "steps"}),
                   fmt::format("schedule.warmup {} leaves nothing of {} for the {} schedule; shorten it.", warmup,
                               counted(recipe.steps, "step"), kind));
  }
  if (!entries.fine({"schedule.min_lr", "optimizer.lr"})) return;
  if (kind == "constant" && min_lr > 0) {
    entries.report(entries.at({"schedule.min_lr"}), "schedule.min_lr has no effect in a constant schedule; remove it.");
  } else if (min_lr > recipe.optimizer.lr) {
    entries.report(entries.at({"schedule.min_lr"}),
                   fmt::format("schedule.min_lr {} is above optimizer.lr {}; lower it.", min_lr, recipe.optimizer.lr));
  }
}

bool learns_positions(const MethodOptions& options) {
  const PositionComponent* encoding = position_components().get(options.positions.type);
  return encoding != nullptr && encoding->owns != nullptr;
}

void check_recipe_method(Recipe& recipe, Entries& entries) {
  MethodOptions& options = recipe.method;
  if (options.factor && !options.scaling) options.scaling = RopeType::linear;
  const bool trains = options.adapter.type != "none" || options.train_also.any() || learns_positions(options);
  if (!trains && entries.fine({"positions.encoding", "adapter.type", "train_also"})) {
    entries.report_bad("method", entries.at({"method"}),
                       fmt::format("method {} has no trainable parameters; choose another.", options.name()));
  }
  RecipeFacts facts;
  if (entries.fine({"context"})) facts.context = recipe.context;
  if (recipe.init && entries.fine({"model.heads"})) facts.heads = recipe.init->heads;
  facts.base_trains = options.train_also.all;
  for (const MethodProblem& problem : method_problems(options, facts)) {
    const std::string key = problem.section == Section::top
                                ? problem.key
                                : fmt::format("{}.{}", section_name(problem.section), problem.key);
    if (entries.fine({key})) entries.report(entries.at({key, "method"}), problem.message(true));
  }
}

void check_random(Recipe& recipe, Entries& entries) {
  RandomModel& model = *recipe.init;
  if (!entries.fine({"model.hidden", "model.heads", "model.kv_heads", "model.head_dim"})) return;
  if (model.kv_heads == 0) model.kv_heads = model.heads;
  if (model.heads % model.kv_heads != 0) {
    entries.report(entries.at({"model.kv_heads"}),
                   fmt::format("model.kv_heads {} does not divide model.heads {}.", model.kv_heads, model.heads));
  }
  if (model.head_dim == 0 && model.hidden % model.heads != 0) {
    entries.report(
        entries.at({"model.heads"}),
        fmt::format("model.heads {} does not divide model.hidden {}; set model.head_dim.", model.heads, model.hidden));
    return;
  }
  if (model.head_dim == 0) model.head_dim = model.hidden / model.heads;
  if (model.head_dim % 2 != 0) {
    entries.report(entries.at({"model.head_dim", "model.heads"}),
                   fmt::format("a head is {} wide, but rotary positions need an even number.", model.head_dim));
  }
}

}  // namespace

void check_recipe(Recipe& recipe, Entries& entries) {
  if (entries.fine({"shard", "checkpointing"}) && recipe.shard == "base" &&
      recipe.checkpointing == Checkpointing::off) {
    entries.report(
        entries.at({"shard", "checkpointing"}),
        "shard: base drops a layer's weights after its use, but without checkpointing the backward still needs "
        "them; set checkpointing: full or selective.");
  }
  check_schedule(recipe, entries);
  if (entries.fine({"eval_every", "held_out"}) && recipe.eval_every > 0 && recipe.held_out == 0) {
    entries.report(entries.at({"eval_every"}),
                   "eval_every asks for evaluations, but held_out keeps no data for them; set held_out.");
  }
  if (entries.fine({"method"})) check_recipe_method(recipe, entries);
  if (recipe.init) check_random(recipe, entries);
}

}  // namespace tapetune::schema
