// The model of a recipe on the meta device.
#pragma once

#include "checkpoint/weights.h"
#include "recipe/recipe.h"

namespace tapetune {

struct MetaModel {
  ModelConfig config;
  LlamaWeights weights;  // on the meta device: shapes and dtypes only
  at::ScalarType dtype;  // of the activations
};

// Reads config.json, and the shards' headers where there are any.
MetaModel meta_model(const Recipe& recipe);

}  // namespace tapetune
