// What a recipe will take, before it starts: parameters, memory, disk, tokens and time.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plan/flops.h"
#include "plan/traffic.h"
#include "recipe/recipe.h"

namespace tapetune {

// What will train.
struct Machine {
  std::int64_t ranks = 1;
  bool gpus = false;  // a rank each; else a CPU
};

struct Plan {
  std::int64_t parameters = 0, trained = 0;
  std::map<std::string, std::int64_t> trained_by_part;  // Parameter::group
  std::vector<std::pair<std::string, double>> memory;   // bytes by part, of one rank
  double peak_memory() const;
  double checkpoint_bytes = 0;  // of one
  double disk_bytes = 0;        // at most, while it trains
  std::int64_t tokens = 0;
  std::optional<double> epochs;  // where the data is there to be counted
  double step_flops = 0;         // of all ranks, with what checkpointing computes again
  StepTraffic traffic;           // what a rank sends in a step
  std::optional<double> step_seconds;
};

// The model's config.json is enough; the data need not be there.
Plan make_plan(const Recipe& recipe, const Machine& machine = {});

// The seconds of a step on this machine, from a few steps of a random model with the recipe's shape and method; with
// fewer layers, and then fewer tokens, where those would take more than `budget` operations (by default, what a desktop
// does in a few seconds).
double probe_step(const Recipe& recipe, double budget = 5e11);

}  // namespace tapetune
