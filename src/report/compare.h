// Recipes side by side: trains what is not trained yet, measures all of it and the base model alike, writes the report.
// Whatever is done stays done: a comparison that was cut off goes on, and ends with the same numbers.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "adapters/adapter.h"
#include "distributed/world.h"
#include "recipe/recipe.h"
#include "report/comparison.h"
#include "report/eval_file.h"

namespace tapetune {

struct NamedRecipe {
  std::string name;
  Recipe recipe;
};

// Files or shipped names, with the same settings over all of them; called by their file names. `runs`, where it is
// given, holds the run folders in place of those that the recipes name.
std::vector<NamedRecipe> read_recipes(const std::vector<std::string>& recipes, const std::vector<std::string>& settings,
                                      const std::filesystem::path& runs = {});

struct CompareOptions {
  EvalPlan plan;
  std::filesystem::path out;
  std::string version;
};

// Fails before anything is trained where the recipes cannot be compared, or a text is too short for a context. Ranks
// train and measure together; rank 0 alone writes, and all of them read the run folders.
Comparison compare(const std::vector<NamedRecipe>& recipes, const CompareOptions& options, World& world);

// report.html, results.json, results.csv, cost.csv, table.md and charts/, each whole or as it was before.
void write_report(const Comparison& comparison, const std::filesystem::path& out);

}  // namespace tapetune
