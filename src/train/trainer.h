// The training loop: steps that are never lost, in a run folder that can be taken up at any time.
#pragma once

#include <cstdint>
#include <string>

#include "distributed/world.h"
#include "recipe/recipe.h"

namespace tapetune {

struct TrainResult {
  std::int64_t first_step = 0;  // where this process began
  double first_step_at = 0;     // and when, in seconds of the monotonic clock
  std::int64_t steps = 0;       // done in all
  double loss = 0;              // of the last step
  std::string adapter;          // the folder of the result
};

// Trains until the recipe's last step. Ctrl-C and SIGTERM save and throw Interrupted; a loss or gradient that is no
// number stops with an Error that names it, and the last checkpoint stays. All ranks of the world call it; rank 0 alone
// reads and writes the run folder.
TrainResult train(const Recipe& recipe, const std::string& version, World& world);

}  // namespace tapetune
