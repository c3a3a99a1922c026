// Compares recipes: trains those that are not trained yet, and evaluates all of them and the base model in the same
// way. Finished training and evaluations are kept, so a comparison that was interrupted resumes, and ends with the same
// numbers.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "compare/comparison.h"
#include "compare/eval_file.h"
#include "compare/recipes.h"
#include "distributed/world.h"
#include "train/trainer.h"

namespace tapetune {

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

}  // namespace tapetune
