// Compares recipes: trains those that are not trained yet, evaluates all of them and the base model in the same way,
// and writes the report. Finished training and evaluations are kept, so a comparison that was interrupted resumes, and
// ends with the same numbers.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "adapters/build_model.h"
#include "distributed/world.h"
#include "recipe/recipe.h"
#include "report/comparison.h"
#include "report/eval_file.h"
#include "train/trainer.h"

namespace tapetune {

struct NamedRecipe {
  std::string name;
  Recipe recipe;
};

// Reads files or shipped recipes, with the same settings over all of them; each is named after its file. `runs`, if
// given, replaces the run folders that the recipes name.
std::vector<NamedRecipe> read_recipes(const std::vector<std::string>& recipes, const std::vector<std::string>& settings,
                                      const std::filesystem::path& runs = {});

struct CompareOptions {
  EvalPlan plan;
  std::filesystem::path out;
  std::string version;
  // The command line, for the command that the report suggests: a word for each recipe, key=value, --eval's file.
  std::vector<std::string> recipe_words, settings;
  std::string eval_file;
  DescribeError describe_error;  // for the logs of the runs
};

// Fails before any training if the recipes cannot be compared, or a text is too short for a context. Ranks train and
// evaluate together; only rank 0 writes, and all of them read the run folders.
Comparison compare(const std::vector<NamedRecipe>& recipes, const CompareOptions& options, World& world);

// Writes report.html, results.json, results.csv, cost.csv, table.md and charts/, each file atomically.
void write_report(const Comparison& comparison, const std::filesystem::path& out);

}  // namespace tapetune
