// Training the recipes of a comparison, and what their runs recorded.
#pragma once

#include <string>
#include <vector>

#include "compare/comparison.h"
#include "compare/recipes.h"
#include "distributed/world.h"
#include "train/trainer.h"

namespace tapetune {

// Fails where a run has more steps than its recipe asks for.
void require_not_trained_longer(const std::vector<NamedRecipe>& recipes);

// Trains what is not trained yet, in this process: checkpoints make a kill harmless, and no child process can outlive
// its parent. `describe` words errors for the logs of the runs.
void train_all(const std::vector<NamedRecipe>& recipes, const std::string& version, const DescribeError& describe,
               World& world);

// What metrics.jsonl and machines.json say of a finished run.
struct TrainingRecord {
  std::vector<StepLoss> losses, held_out_losses;
  Cost cost;  // but for the number of trained parameters
};
TrainingRecord read_training(const Recipe& recipe);

}  // namespace tapetune
