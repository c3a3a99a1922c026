// The model of a recipe without its numbers.
#pragma once

#include "model/weights.h"
#include "recipe/recipe.h"

namespace tapetune {

struct PlannedBase {
  ModelConfig config;
  LlamaWeights weights;  // on the meta device: shapes and dtypes only
  at::ScalarType dtype;  // of the activations
};

// Reads config.json, and the shards' headers where there are any.
PlannedBase planned_base(const Recipe& recipe);

}  // namespace tapetune
