#include "compare/compare.h"

#include <ATen/Parallel.h>

#include <optional>

#include "compare/measure.h"
#include "compare/output.h"
#include "compare/positions.h"
#include "compare/training.h"
#include "core/machine.h"
#include "core/partial.h"
#include "core/signals.h"
#include "run/inputs.h"
#include "run/open.h"
#include "run/run_data.h"

namespace tapetune {

namespace {

namespace fs = std::filesystem;

struct Prepared {
  ModelConfig base_config;
  EvalData data;
};

// All that must hold before hours of training: runs fit their recipes, every text, context and stride can be measured.
Prepared prepare(const std::vector<NamedRecipe>& recipes, const EvalPlan& plan, World& world) {
  const Recipe& first = recipes.front().recipe;
  const BaseModel base = open_base(first);
  Prepared prepared{base.config, {base.tokenizer, {}, {}}};
  EvalData& data = prepared.data;
  const Recipe found = with_found_paths(first, first.run, /*say=*/false);
  const std::vector<std::string> paths = text_paths(plan, found);
  if (world.is_rank0()) require_not_trained_longer(recipes);
  // Once for all recipes, which have the same data.
  prepare_text(first, found, base.tokenizer, world);
  for (std::size_t i = 1; world.is_rank0() && i < recipes.size(); ++i) share_packed(found, recipes[i].recipe);
  for (const std::string& path : paths) data.texts.push_back(open_text(path, found, base, plan.limit));
  data.contexts = choose_contexts(plan, first.context, data.texts);
  require_measurable(plan, data, Llama(base.config, base.weights, base.dtype));
  return prepared;
}

void prepare_cache(const fs::path& folder) {
  make_out_folder(folder);
  remove_abandoned(folder);
}

std::string random_name(const Recipe& recipe) {
  return fmt::format("random weights ({} layers, width {}, seed {})", recipe.init->layers, recipe.init->hidden,
                     recipe.seed);
}

// What the comparison is of, without results.
Comparison described(const std::vector<NamedRecipe>& recipes, const Prepared& prepared, const CompareOptions& options,
                     const World& world) {
  const Recipe& first = recipes.front().recipe;
  Comparison result;
  result.version = options.version;
  result.base = first.init ? random_name(first) : first.model;
  result.base_hash = first.model_hash;
  result.base_config = prepared.base_config;
  result.trained_context = first.context;
  result.steps = first.steps;
  result.tokens_per_step = first.batch * first.context;
  result.seed = first.seed;
  result.protocol = options.plan.protocol;
  result.contexts = prepared.data.contexts;
  for (const EvalText& text : prepared.data.texts) result.texts.push_back(text.about);
  result.differences = differing_settings(recipes);
  result.positions = position_groups(recipes, result.base_config.rope);
  result.date = utc_time();
  result.machine = machine_name();
  result.threads = at::get_num_threads();
  result.ranks = world.size();
  return result;
}

Entry base_entry(const Recipe& recipe, const Measurements& measurements, const World& world) {
  EvalTarget target = EvalTarget::base_of(recipe, world.device());
  Entry entry;
  entry.name = target.name();
  entry.method = "none";
  measurements.measure(target, entry);
  return entry;
}

Entry trained_entry(const NamedRecipe& named, const Measurements& measurements, const World& world) {
  Entry entry;
  entry.name = named.name;
  entry.method = named.recipe.method.name();
  entry.settings = recipe_yaml(named.recipe);
  TrainingRecord record = read_training(named.recipe);
  entry.losses = std::move(record.losses);
  entry.held_out_losses = std::move(record.held_out_losses);
  entry.cost = std::move(record.cost);
  EvalTarget target = EvalTarget::trained_by(named.name, named.recipe, world.device());
  measurements.measure(target, entry);
  return entry;
}

}  // namespace

Comparison compare(const std::vector<NamedRecipe>& given, const CompareOptions& options, World& world) {
  // Ranks stop at points that they agree on, which training and evaluation do.
  std::optional<HoldInterrupts> together;
  if (world.size() > 1) together.emplace();
  const fs::path cache = options.out / "evaluations";
  const std::vector<NamedRecipe> recipes = require_comparable(given, world);
  const Prepared prepared = prepare(recipes, options.plan, world);
  if (world.is_rank0()) prepare_cache(cache);

  train_all(recipes, options.version, options.describe_error, world);

  Comparison result = described(recipes, prepared, options, world);
  const Measurements measurements(options.plan, prepared.data, options.version, cache, world);
  result.pictured = measurements.pictured();
  result.entries.push_back(base_entry(recipes.front().recipe, measurements, world));
  for (const NamedRecipe& each : recipes) result.entries.push_back(trained_entry(each, measurements, world));
  if (result.positions.size() > 1) {
    result.equal_positions =
        equal_positions_command(recipes, best_positions(recipes, result), result.base_config.rope, options);
  }
  return result;
}

}  // namespace tapetune
