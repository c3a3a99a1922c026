#include "compare/training.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <sstream>

#include "compare/output.h"
#include "core/digits.h"
#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/memory.h"
#include "core/signals.h"
#include "run/open.h"
#include "run/record.h"
#include "run/run_folder.h"

namespace tapetune {

namespace {

namespace fs = std::filesystem;

// The step that a run of this very recipe has reached, if there is one.
std::optional<std::int64_t> reached_step(const Recipe& recipe) {
  const fs::path folder = recipe.run;
  if (!is_run(folder)) return std::nullopt;
  const std::vector<RecipeDifference> changed = differences(RunFolder::recipe_in(folder), RunFolder::as_begun(recipe));
  if (std::any_of(changed.begin(), changed.end(), [](const RecipeDifference& d) { return d.affects_result; }))
    return {};
  const auto last = RunFolder::latest_in(folder);
  return last ? std::optional(last->step) : std::nullopt;
}

bool is_trained(const Recipe& recipe) {
  std::error_code status;
  return fs::is_directory(fs::path(recipe.run) / "adapter", status) && reached_step(recipe) == recipe.steps;
}

std::vector<std::string> machines_of(const fs::path& run) {
  std::vector<std::string> machines;
  for (const Json& each : read_machines(run)) {
    std::string machine = machine_text(each.value("machine", ""), each.value("threads", 1), each.value("ranks", 1));
    if (std::find(machines.begin(), machines.end(), machine) == machines.end()) machines.push_back(std::move(machine));
  }
  return machines;
}

}  // namespace

void require_not_trained_longer(const std::vector<NamedRecipe>& recipes) {
  for (const auto& [name, recipe] : recipes) {
    const auto step = reached_step(recipe);
    if (!step || *step <= recipe.steps) continue;
    fail("compare",
         "{}: was trained for {}, but the recipe asks for {}; set steps={} for all recipes, or choose "
         "other run folders with --runs DIR.",
         recipe.run, counted(*step, "step"), recipe.steps, *step);
  }
}

void train_all(const std::vector<NamedRecipe>& recipes, const std::string& version, const DescribeError& describe,
               World& world) {
  for (std::size_t i = 0; i < recipes.size(); ++i) {
    check_interrupted();
    const auto& [name, recipe] = recipes[i];
    if (world.broadcast(world.is_rank0() && is_trained(recipe) ? "trained" : "") == "trained") {
      say_progress("[compare] {} of {}: {} is already trained", i + 1, recipes.size(), name);
      continue;
    }
    say_progress("[compare] {} of {}: training {}, {}, in {}", i + 1, recipes.size(), name,
                 counted(recipe.steps, "step"), recipe.run);
    start_memory_peak();  // each run begins with trimmed memory: its peak does not include that of the runs before it
    train(recipe, version, world, describe);
  }
}

TrainingRecord read_training(const Recipe& recipe) {
  const fs::path run = recipe.run;
  // It grows with the steps: 200 bytes each.
  std::istringstream lines(read_text(run / "metrics.jsonl", std::uint64_t{4} << 30));
  TrainingRecord record;
  record.cost.machines = machines_of(run);
  std::vector<double> rates;
  for (std::string line; std::getline(lines, line);) {
    const Json json = parse_json(line, "compare", (run / "metrics.jsonl").string());
    const auto step = json.value("step", std::int64_t{0});
    if (json.contains("eval_loss")) record.held_out_losses.push_back({step, json.value("eval_loss", 0.0)});
    if (!json.contains("loss")) continue;
    record.losses.push_back({step, json.value("loss", 0.0)});
    rates.push_back(json.value("tokens_per_s", 0.0));
    record.cost.peak_mb = std::max(record.cost.peak_mb, json.value("peak_mb", 0.0));
  }
  if (rates.empty()) return record;
  std::sort(rates.begin(), rates.end());
  record.cost.tokens_per_s = rates[rates.size() / 2];
  record.cost.step_seconds = static_cast<double>(recipe.batch * recipe.context) / record.cost.tokens_per_s;
  return record;
}

}  // namespace tapetune
