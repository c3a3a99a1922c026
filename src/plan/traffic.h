// What a rank sends in a step.
#pragma once

#include <cstdint>

#include "adapters/build_model.h"
#include "recipe/recipe.h"

namespace tapetune {

struct StepTraffic {     // bytes
  double gradients = 0;  // their all-reduce, and the loss's
  double weights = 0;    // a sharded base's, to where they are used
  double values = 0;     // what a shared optimiser has updated
  double sequence = 0;   // heads and tokens of shared sequences
};

// Rings: an all-reduce of n bytes over R ranks sends 2 n (R - 1) / R from each, an all-gather of n in all n (R - 1) /
// R.
StepTraffic step_traffic(const AdaptedModel& adapted, const Recipe& recipe, std::int64_t ranks);

// The bytes of the largest units that are all-gathered: two of them are there at once.
double gathered_bytes(const AdaptedModel& adapted);
// What can be sharded: frozen matrices, with their biases.
double frozen_bytes(const AdaptedModel& adapted);

}  // namespace tapetune
