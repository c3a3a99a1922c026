// The training loop, in a run folder from which it can be resumed at any time.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>

#include "distributed/world.h"
#include "recipe/recipe.h"

namespace tapetune {

struct TrainResult {
  std::int64_t first_step = 0;  // where this process began
  double first_step_at = 0;     // and when, in seconds of the monotonic clock
  double seconds = 0;           // since then, until the last step ended
  std::int64_t steps = 0;       // done in all
  double loss = 0;              // of the last step
  double tokens_per_s = 0;      // of this process's steps; 0 where it had none to do
  double peak_mb = 0;           // of memory, on this rank
  std::string adapter;          // the folder of the result
};

// What the user is told of an exception, in one line.
using DescribeError = std::function<std::string(const std::exception_ptr&)>;

// Trains until the recipe's last step. Ctrl-C and SIGTERM save and throw Interrupted; a loss or gradient that is NaN or
// Inf stops with an Error that names it, and the last checkpoint stays. All ranks of the world call it; rank 0 alone
// reads and writes the run folder; its train.log gets errors as `describe` words them.
TrainResult train(const Recipe& recipe, const std::string& version, World& world, const DescribeError& describe);

}  // namespace tapetune
